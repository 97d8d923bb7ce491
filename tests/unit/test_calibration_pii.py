"""Personal data is replaced by typed placeholders; numbers of business that look alike are left alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.calibration.pii import scrub
from quantkit.resources import resource


def _luhn(stem: str) -> str:
    """`stem` with its check digit."""
    return next(
        stem + str(check)
        for check in range(10)
        if sum(d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(map(int, reversed(f"{stem}{check}"))))
        % 10
        == 0
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to anna.b+x@mail.example.co.uk, please", "Write to [EMAIL], please"),
        ("邮箱是zhang_wei@qq.com谢谢", "邮箱是[EMAIL]谢谢"),
        ("Call +49 (0)30 1234567 or +1-415-555-2671.", "Call [PHONE] or [PHONE]."),
        ("My number is (415) 555-2671", "My number is [PHONE]"),
        ("Tel. 020 7946 0958 after six", "Tel. [PHONE] after six"),
        ("手机13800138000，座机010-62345678", "手机[PHONE]，座机[PHONE]"),
        ("打138 0013 8000或者+86 13912345678", "打[PHONE]或者[PHONE]"),
        ("card 4111 1111 1111 1111 exp 12/27", "card [CARD] exp 12/27"),
        ("amex 3782 822463 10005", "amex [CARD]"),
        ("银行卡号6222021234567890128", "银行卡号[CARD]"),
        ("IBAN DE89 3704 0044 0532 0130 00 at once", "IBAN [IBAN] at once"),
        ("GB82WEST12345698765432", "[IBAN]"),
        ("身份证11010519491231002X，谢谢", "身份证[RESIDENT_ID]，谢谢"),
        ("from 203.0.113.77 port 22", "from [IP] port 22"),
        ("peer 2001:db8:85a3::8a2e:370:7334 is up", "peer [IP] is up"),
        ("see https://x.example/a?user=1&access_token=abcd1234 now", "see [URL] now"),
        ("postgres://admin:hunter2@db.internal:5432/prod", "[URL]"),
        ("Ring me on 07700 900123, mobil 0170/1234567", "Ring me on [PHONE], mobil [PHONE]"),
        ("range 10.0.0.1-10.0.0.9, then 10.1.2.3:8080", "range [IP]-[IP], then [IP]:8080"),
        ("my SSN is 078-05-1120", "my SSN is [SSN]"),
        ("Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.s3cr3t", "Authorization: Bearer [SECRET]"),
        ("api_key=sk-abcdef1234567890abcdef12", "api_key=[SECRET]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nok", "[SECRET]\nok"),
        ("SELECT name FROM users WHERE phone = '13912345678'", "SELECT name FROM users WHERE phone = '[PHONE]'"),
    ],
)
def test_personal_data_is_replaced(text: str, expected: str) -> None:
    assert scrub(text).text == expected


@pytest.mark.parametrize(
    "text",
    [
        "Order 4929123412341234 was shipped on 2024-01-15 at 10:30:45",
        "订单号13912345678已发货，运单：139-1234-5678",
        "invoice no. 415-555-2671, total 1,234,567.89",
        "SELECT * FROM orders WHERE order_id = 13912345678 AND created > 1700000000000 LIMIT 1000",
        "UPDATE stock SET qty = qty - 10000000000 WHERE sku = 5500000000000005",
        "ISBN 978-3-16-148410-0, EAN 4006381333931",
        "firmware 4.2.1.0 and version 10.0.19045.3803; v1.2.3.4",
        "listen on 127.0.0.1 or 0.0.0.0, mask 255.255.255.0",
        "std::vector<int> a; a::b::c; MAC aa:bb:cc:dd:ee:ff",
        "https://docs.example.com/guide?page=2&lang=en#keys",
        "@app.route('/x') and user@localhost, 5@3",
        "身份证号码110105194912310021写错了",
        "3.14159265358979 and 1234567890123456",
        "GB82WEST12345698765431 has a typo; DE00 is no IBAN",
        "pip install package-1.2.3.4, tag 1.2.3.4-beta, part no. 123-45-6789",
        "task-force, sk-learn and scikit-learn",
        "table 1: 120 240 360 480 600",
        "From 2019 to 2024, 100-200 units, 555-0132 in a film",
    ],
)
def test_numbers_of_business_are_left_alone(text: str) -> None:
    made = scrub(text)
    assert made.text == text
    assert not made.counts


def test_what_was_replaced_is_counted_by_kind() -> None:
    made = scrub("a@b.de, c@d.fr, +49 170 1234567, 203.0.113.77")
    assert made.counts == {"email": 2, "phone": 1, "ip": 1}


def test_scrubbing_twice_changes_nothing_more() -> None:
    once = scrub("a@b.de +49 170 1234567 4111 1111 1111 1111 203.0.113.77 https://u:pw@h/x")
    again = scrub(once.text)
    assert again.text == once.text
    assert not again.counts


@given(st.integers(0, 10**11 - 1))
def test_every_valid_card_number_is_found_and_none_with_a_wrong_digit(stem: int) -> None:
    number = _luhn(f"4929{stem:011}")
    assert scrub(f"pay with {number}!").text == "pay with [CARD]!"
    wrong = number[:-1] + str((int(number[-1]) + 1) % 10)
    assert scrub(f"pay with {wrong}!").counts["card"] == 0


def test_one_random_long_number_in_a_hundred_at_most_is_taken_for_personal_data() -> None:
    source = random.Random(7)
    hits = sum(
        bool(scrub(f"We counted {source.randrange(10 ** (n - 1), 10**n)} of them").counts)
        for n in range(6, 21)
        for _ in range(100)
    )
    assert hits <= 15


def test_shipped_conversations_hold_little_that_looks_personal() -> None:
    text = resource("calib/conversations.jsonl").read_text(encoding="utf-8")
    counts = scrub(text).counts
    assert counts["card"] == counts["iban"] == counts["resident_id"] == counts["url"] == 0


@pytest.mark.parametrize(
    "text",
    [
        "a" * 100_000 + "@",
        "1 " * 50_000,
        "+" + "1-" * 50_000,
        ":" * 100_000,
        "x://" + "a" * 100_000,
        "(0" * 50_000,
        "-----BEGIN PRIVATE KEY-----" * 2000,
        "sk-" * 40_000,
        "eyJ" * 40_000,
    ],
)
@pytest.mark.timeout(10)
def test_no_text_makes_it_slow(text: str) -> None:
    scrub(text)
