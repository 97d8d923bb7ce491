// The blind page. All text from models is set as text (textContent, text nodes), never as markup.

const $ = (id) => document.getElementById(id);
const REASONS = {
  facts: ["w", "Wrong facts"],
  instruction: ["i", "Instruction ignored"],
  language: ["l", "Wrong language"],
  garbled: ["g", "Garbled, repeats"],
  format: ["f", "Broken format"],
  unsafe: ["x", "Unsafe"],
  incomplete: ["p", "Incomplete"],
};
const QUESTIONS = {
  first: "How much worse is answer 2?",
  second: "How much worse is answer 1?",
  "both-bad": "How bad are both? Enter alone is fine.",
};
const ROLES = { system: "Instructions", user: "User", assistant: "Assistant" };

const state = {
  reviewer: sessionStorage.getItem("reviewer") ?? "",
  more: false,
  pair: null,
  choice: "",
  severity: "",
  reasons: new Set(),
  sure: false,
  busy: false,
};

async function call(name, body = {}) {
  const answer = await fetch(`api/${name}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ reviewer: state.reviewer, more: state.more, ...body }),
  }).catch(() => null);
  if (answer === null) throw new Error("No answer. Is quantkit review still running?");
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

/** Runs one thing at a time; a second key press meanwhile does nothing. */
async function once(action) {
  if (state.busy) return;
  state.busy = true;
  try {
    await action();
  } catch (error) {
    tell(error.message, true);
  } finally {
    state.busy = false;
  }
}

async function load() {
  show(await call("state"));
}

function show(found) {
  document.title = `${found.artifact}: quantkit review`;
  $("artifact").textContent = found.artifact;
  $("who").textContent = found.reviewer && `judged by ${found.reviewer}`;
  showProgress(found.progress, Boolean(found.reviewer));
  $("name").hidden = Boolean(found.reviewer);
  $("pair").hidden = !found.pair;
  $("done").hidden = !found.done;
  $("panel").hidden = !found.pair;
  $("how").hidden = Boolean(found.done);
  state.pair = found.pair;
  $("undo").disabled = $("take-back").disabled = !found.undo;
  choose("");
  if (found.pair) showPair(found.pair);
  else if (found.done) showDone(found.done);
  else $("reviewer").focus();
}

function showProgress(found, started) {
  const time = found.minutes ? `, about ${found.minutes} min left` : "";
  const round = found.stage > 1 ? `round ${found.stage}: ` : "";
  $("progress").textContent = started ? `${round}${found.done} of ${found.total}${time}` : "";
  const bar = $("bar");
  bar.setAttribute("aria-valuemax", found.total);
  bar.setAttribute("aria-valuenow", found.done);
  bar.firstElementChild.style.width = `${found.total ? (100 * found.done) / found.total : 0}%`;
  $("notice").hidden = !found.notice;
  $("notice").textContent = found.notice;
}

function showPair(pair) {
  const language = pair.language === "zh" ? "zh-Hans" : pair.language;
  $("request").replaceChildren(
    ...pair.turns.map((turn) => {
      const block = element("div", `turn ${turn.role in ROLES ? turn.role : ""}`);
      block.append(element("h3", "", ROLES[turn.role] ?? turn.role), text(turn.text, language));
      return block;
    }),
  );
  $("criteria").hidden = !pair.criteria;
  $("criteria").lastElementChild.textContent = pair.criteria;
  let marked = false;
  document.querySelectorAll("#answers .text").forEach((place, index) => {
    const block = text("", language);
    for (const [piece, differs] of pair.answers[index]) {
      block.append(differs ? element("mark", "", piece) : document.createTextNode(piece));
      marked ||= differs;
    }
    if (!pair.answers[index].length) block.append(element("i", "soft", "(an empty answer)"));
    place.replaceChildren(block);
    place.nextElementSibling.hidden = !pair.cut[index];
  });
  const same = JSON.stringify(pair.answers[0]) === JSON.stringify(pair.answers[1]);
  $("legend").textContent = marked
    ? "Underlined: words the other answer does not have."
    : same ? "" : "The two answers have few words in common.";
  $("request").scrollTop = pair.turns.length > 2 ? $("request").lastElementChild.offsetTop - $("request").offsetTop : 0;
  window.scrollTo(0, 0);
}

function showDone(done) {
  const place = $("done");
  place.className = `card ${done.decision}`;
  place.querySelector("h1").textContent = done.title;
  place.querySelector(".reason").textContent = done.reason;
  place.querySelector(".rate").textContent = done.rate;
  place.querySelector(".notes").replaceChildren(...done.notes.map((note) => element("li", "", note)));
  place.querySelector(".signed").textContent = done.signed || (done.decision === "continue" ? "" : "It counts once signed.");
  $("sign").hidden = done.decision === "continue" || Boolean(done.signed);
  $("more").hidden = !done.more;
  place.focus();
}

function element(tag, classes, words = "") {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.textContent = words;
  return made;
}

function text(words, language) {
  const made = element("div", "words", words);
  made.lang = language;
  made.dir = "auto";
  return made;
}

function choose(choice) {
  state.choice = choice;
  state.reasons.clear();
  $("comment").value = "";
  grade(choice === "both-bad" ? "none" : "");
  press("[data-choice]", (button) => button.dataset.choice === choice);
  press("[data-reason]", () => false);
  document.querySelectorAll("#answers article").forEach((card, index) => {
    card.classList.toggle("chosen", choice === ["first", "second"][index]);
  });
  $("detail").hidden = !choice;
  $("grade").hidden = !(choice in QUESTIONS);
  $("question").textContent = QUESTIONS[choice] ?? "";
  if (choice) tell("");
}

function grade(severity) {
  state.severity = severity;
  state.sure = false;
  press("[data-severity]", (button) => button.dataset.severity === severity);
  $("keep").classList.toggle("ready", Boolean(severity) || state.choice === "tie");
}

function toggle(reason) {
  if (!state.reasons.delete(reason)) state.reasons.add(reason);
  press("[data-reason]", (button) => state.reasons.has(button.dataset.reason));
}

function press(which, pressed) {
  for (const button of document.querySelectorAll(which)) button.setAttribute("aria-pressed", pressed(button));
}

function tell(words, wrong = false) {
  $("told").textContent = words;
  $("told").classList.toggle("wrong", wrong);
  if (wrong && $("panel").hidden) window.alert(words);
}

async function keep() {
  if (!state.choice) return;
  if (!state.severity && state.choice !== "tie") {
    tell(`${QUESTIONS[state.choice]} Press n, m, j or c.`);
    return;
  }
  if (["major", "critical"].includes(state.severity) && !state.sure) {
    state.sure = true;
    tell("Major and critical stand: they cannot be undone. Enter again keeps it.");
    return;
  }
  let kept;
  try {
    kept = await call("judge", {
      id: state.pair.id,
      choice: state.choice,
      severity: state.severity || "none",
      reasons: [...state.reasons],
      comment: $("comment").value.trim(),
    });
  } catch (error) {
    await load(); // another tab may have been faster
    throw error;
  }
  await load();
  tell(kept.told);
}

async function undo() {
  const undone = await call("undo");
  await load();
  tell(undone.told);
}

async function sign() {
  await call("sign");
  await load();
}

function begin(event) {
  event.preventDefault();
  state.reviewer = $("reviewer").value.trim();
  once(async () => {
    try {
      await load();
      $("reviewer").blur(); // hidden by now, it would still take a fast reader's first key
      sessionStorage.setItem("reviewer", state.reviewer);
    } catch (error) {
      state.reviewer = "";
      throw error;
    }
  });
}

for (const [reason, [key, words]] of Object.entries(REASONS)) {
  const chip = element("button", "chip");
  chip.append(element("kbd", "", key), ` ${words}`);
  chip.dataset.key = key;
  chip.dataset.reason = reason;
  $("reasons").append(chip);
}
document.querySelectorAll("[data-choice]").forEach((b) => b.addEventListener("click", () => choose(b.dataset.choice)));
document.querySelectorAll("[data-severity]").forEach((b) => b.addEventListener("click", () => grade(b.dataset.severity)));
document.querySelectorAll("[data-reason]").forEach((b) => b.addEventListener("click", () => toggle(b.dataset.reason)));
$("keep").addEventListener("click", () => once(keep));
$("undo").addEventListener("click", () => once(undo));
$("take-back").addEventListener("click", () => once(undo));
$("sign").addEventListener("click", () => once(sign));
$("more").addEventListener("click", () => once(async () => { state.more = true; await load(); }));
$("help").addEventListener("click", () => $("helping").showModal());
$("close").addEventListener("click", () => $("helping").close());
$("name").addEventListener("submit", begin);

document.addEventListener("click", (event) => {
  if (event.detail && event.target.closest("button")) document.activeElement.blur(); // so that Enter still means keep
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat || $("helping").open) return;
  const writing = event.target instanceof HTMLTextAreaElement || event.target instanceof HTMLInputElement;
  if (writing && event.target !== $("comment")) return;
  if (writing && event.key === "Escape") {
    $("comment").blur();
  } else if (!writing && event.key === "Escape" && state.choice) {
    choose("");
  } else if (!writing && event.key === "k" && state.choice) {
    event.preventDefault();
    $("comment").focus();
  } else if (!writing || (event.key === "Enter" && !event.shiftKey)) {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const button = [...document.querySelectorAll("[data-key]")].find(
      (each) => each.dataset.key === key && each.offsetParent !== null && !each.disabled,
    );
    if (button === undefined && key === "u" && state.reviewer) tell("Nothing to undo: only the last judgement, before the next, and not a major or critical one.");
    const itself = event.key === "Enter" && event.target instanceof HTMLButtonElement; // reached by Tab
    if (button === undefined || itself) return;
    event.preventDefault();
    $("comment").blur();
    button.click();
  }
});

once(load);
