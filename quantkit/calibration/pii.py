"""Personal data out of calibration text: found by form and check digit, replaced by typed placeholders, counted.

Rules lean towards leaving business numbers alone (order numbers, versions, SQL literals): a card passes Luhn and has an
issuer's prefix, an IBAN passes mod 97 (ISO 13616), a Chinese resident id its date and check character (GB 11643-1999);
a phone number has a country code, a national form, or is a Chinese mobile number, and is no labelled order number.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from re import Match

KINDS = ("url", "secret", "email", "iban", "resident_id", "card", "ssn", "phone", "ip")
"""What is looked for, in this order: a later kind never sees what an earlier one replaced."""

_NOT_IN_WORD = r"(?<![A-Za-z0-9_])"
_NOT_BEFORE_WORD = r"(?![A-Za-z0-9_])"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s<>\"'`，。；）)\]}]{3,2000}")
_URL_SECRET = re.compile(
    r"[?&#;](?:[a-z0-9._-]{0,30}(?:token|secret|password|passwd|signature|credential|api[_-]?key|access[_-]?key)"
    r"|key|sig|pwd|auth|jwt|session(?:_?id)?|sid|otp)=[^&#\s]{4,}",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"(?<![A-Za-z0-9_-])(?:eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{3,}"  # JSON web token, RFC 7519
    r"|(?:sk|pk|rk)[-_][A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|xox[abprs]-[A-Za-z0-9-]{10,})"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----(?:.{0,8000}?-----END [A-Z ]{0,20}PRIVATE KEY-----)?",
    re.DOTALL,
)
_URL_USER = re.compile(r"://[^/\s:@]{0,100}:[^/\s@]{1,200}@")
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9-])"
)
_IBAN = re.compile(_NOT_IN_WORD + r"[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,4})?" + _NOT_BEFORE_WORD)
_RESIDENT = re.compile(_NOT_IN_WORD + r"[1-8]\d{16}[\dXx]" + _NOT_BEFORE_WORD)
_CARD = re.compile(
    r"(?<![A-Za-z0-9_.-])(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{1,7}|\d{4}([ -])\d{6}\2\d{5})(?![A-Za-z0-9_]|[.-]\d)"
)
_SSN = re.compile(r"(?<![A-Za-z0-9_.-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![A-Za-z0-9_]|[.-]\d)")
_PHONE = re.compile(
    r"(?<![A-Za-z0-9_.+-])(?:"
    r"(?:\+|00)[1-9]\d{0,2}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,5}(?:[ .-]?\d{2,5}){1,4}"  # with a country code
    r"|1[3-9]\d{9}|1[3-9]\d([ -])\d{4}\1\d{4}"  # China, mobile
    r"|0\d{2,3}-\d{7,8}"  # China, fixed
    r"|(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}([ .-]))[2-9]\d{2}[ .-]\d{4}"  # North America
    r"|\(?0\d{1,4}\)?(?: \d{2,4}){2,4}|0\d{2,4}[ /]\d{5,8}"  # Europe, trunk prefix and spaces
    r")(?![A-Za-z0-9_]|[.-]\d)"
)
_ORDER = re.compile(
    r"(?:order|invoice|ticket|tracking|shipment|parcel|sku|serial|reference|ref|case|contract|batch|part|model|article|"
    r"quote|policy|claim|item|product|id|no|nr|number|=|#|<|>|单号|订单|编号|号码为?订单|批次|合同|发票|序列号|型号|运单)"
    r"[号码]?[ .:：#№=(（'\"]{0,4}$",
    re.IGNORECASE,
)
_CALLED = re.compile(
    r"(?<![a-z])(?:phone|tel|telephone|mobile|cell|fax|call|contact|whatsapp)(?![a-z])|电话|手机|联系|致电|拨打",
    re.IGNORECASE,
)
_SSN_CALLED = re.compile(r"(?<![a-z])ssn|social security", re.IGNORECASE)
_CARD_CALLED = re.compile(r"(?<![a-z])card|卡", re.IGNORECASE)
_IPV4 = re.compile(r"(?<![A-Za-z0-9_.])(?<![A-Za-z_]-)(?:\d{1,3}\.){3}\d{1,3}(?![A-Za-z0-9_]|\.\d|-[A-Za-z])")
_IPV6 = re.compile(r"(?<![A-Za-z0-9_:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?![A-Za-z0-9_:])")
_VERSION = re.compile(
    r"(?:version|ver\.?|v|release|firmware|build|driver|section|版本|固件)[号:： ]{0,3}$", re.IGNORECASE
)
_BEFORE = 24
"""Characters before a number that may label it."""


@dataclass(frozen=True)
class Scrubbed:
    """Text without personal data, and how many of each kind were replaced."""

    text: str
    counts: Counter[str]


def scrub(text: str) -> Scrubbed:
    """`text` with e-mail addresses, phone and card numbers, IBANs, Chinese resident ids, US social security numbers, IP
    addresses, URLs that carry credentials, and keys and tokens of known forms replaced by `[EMAIL]`, `[PHONE]`,
    `[CARD]`, `[IBAN]`, `[RESIDENT_ID]`, `[SSN]`, `[IP]`, `[URL]`, `[SECRET]`."""
    counts: Counter[str] = Counter()
    for kind, pattern, meant in _RULES:

        def replaced(found: Match[str], kind: str = kind, meant: Callable[[Match[str]], bool] = meant) -> str:
            if not meant(found):
                return found[0]
            counts[kind] += 1
            return f"[{kind.upper()}]"

        text = pattern.sub(replaced, text)
    return Scrubbed(text, counts)


def _has_secret(found: Match[str]) -> bool:
    return bool(_URL_SECRET.search(found[0]) or _URL_USER.search(found[0]))


def _is_iban(found: Match[str]) -> bool:
    code = found[0].replace(" ", "")
    if not 15 <= len(code) <= 34:
        return False
    return int("".join(str(int(c, 36)) for c in code[4:] + code[:4])) % 97 == 1


def _is_resident_id(found: Match[str]) -> bool:
    code = found[0].upper()
    try:
        born = date(int(code[6:10]), int(code[10:12]), int(code[12:14]))
    except ValueError:
        return False
    weights = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
    check = "10X98765432"[sum(w * int(c) for w, c in zip(weights, code, strict=False)) % 11]
    return born.year >= 1900 and check == code[17]


def _is_card(found: Match[str]) -> bool:
    if found[0].isdigit() and _ORDER.search(_before(found)) and not _CARD_CALLED.search(_before(found)):
        return False
    digits = [int(c) for c in found[0] if c.isdigit()]
    number = "".join(map(str, digits))
    lengths = next((sizes for prefix, sizes in _ISSUERS if re.match(prefix, number)), ())
    if len(digits) not in lengths:
        return False
    doubled = [d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


_ISSUERS = (
    (r"4", (13, 16, 19)),
    (r"5[1-5]|2(?:22[1-9]|2[3-9]|[3-6]|7[01]|720)", (16,)),
    (r"3[47]", (15,)),
    (r"6(?:011|4[4-9]|5)", (16, 19)),
    (r"62", (16, 17, 18, 19)),
    (r"35(?:2[89]|[3-8])", (16, 17, 18, 19)),
    (r"3(?:0[0-5]|[689])", (14, 16, 19)),
)
"""Prefix and lengths: Visa, Mastercard, American Express, Discover, UnionPay, JCB, Diners Club (ISO/IEC 7812)."""


def _is_phone(found: Match[str]) -> bool:
    digits = sum(c.isdigit() for c in found[0])
    if not 9 <= digits <= 15:
        return False
    before = _before(found)
    return found[0].startswith("+") or bool(_CALLED.search(before)) or not _ORDER.search(before)


def _is_ssn(found: Match[str]) -> bool:
    return not _ORDER.search(_before(found)) or bool(_SSN_CALLED.search(_before(found)))


def _is_ip(found: Match[str]) -> bool:
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified or found[0].startswith("255."):
        return False
    return not _VERSION.search(_before(found))


def _before(found: Match[str]) -> str:
    return found.string[max(0, found.start() - _BEFORE) : found.start()]


_RULES: tuple[tuple[str, re.Pattern[str], Callable[[Match[str]], bool]], ...] = (
    ("url", _URL, _has_secret),
    ("secret", _SECRET, lambda found: True),
    ("email", _EMAIL, lambda found: True),
    ("iban", _IBAN, _is_iban),
    ("resident_id", _RESIDENT, _is_resident_id),
    ("card", _CARD, _is_card),
    ("ssn", _SSN, _is_ssn),
    ("phone", _PHONE, _is_phone),
    ("ip", _IPV4, _is_ip),
    ("ip", _IPV6, _is_ip),
)
