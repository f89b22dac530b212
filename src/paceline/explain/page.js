// Steps through one answer. Whatever the record says goes in as text nodes, never as markup.
const record = JSON.parse(byId("record").textContent);
const { steps, tokens, totals } = record;
const MEANING = {
  accepted: "drafted, and the target agreed",
  correction: "the target's own, in place of a refused draft",
  bonus: "the target's own, after a wholly accepted draft",
  plain: "the target's own, nothing was drafted",
};
const SECONDS_A_STEP = 0.7;
let current = 0, playing = null;

function byId(id) {
  return document.getElementById(id);
}

function element(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");
const time = (seconds) => (seconds < 0.9995 ? `${(seconds * 1000).toPrecision(3)} ms` : `${seconds.toFixed(2)} s`);
const code = (label, kind) => element("code", kind ? { class: kind } : {}, visible(label));

function figures(place, pairs) {
  const pair = ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value));
  byId(place).replaceChildren(...pairs.map(pair));
}

function listed(labels) {
  const few = labels.slice(0, 3).flatMap((label, i) => [i ? ", " : "", code(label)]);
  return labels.length > 3 ? [...few, ` and ${labels.length - 3} more`] : few;
}

function story(step, index) {
  const own = ownToken(step), parent = step.path.at(-1) ?? -1;
  const start = index ? "No draft. The target wrote " : "The target read the prompt and wrote ";
  if (!step.nodes.length) return [start, code(own.label, "plain"), "."];
  const checked = checkedDraft(step.method, step.nodes.length, step.path.length);
  if (!own) return [`${checked}. There the answer ended.`];
  if (own.origin === "bonus") return [`${checked}, with one more for free: `, code(own.label, "bonus"), "."];
  const refused = step.nodes.filter((node) => node.parent === parent).map((node) => node.label);
  return [`${checked}. Its own `, code(own.label, "correction"), " took the place of ", ...listed(refused), "."];
}

function checkedDraft(method, drafted, kept) {
  const [them, all] = drafted === 1 ? ["it", "it"] : ["them", "all"];
  const who = method === "draft" ? "The draft model" : method;
  const draft = `${who} drafted ${counted(drafted, "token")}`, verdict = kept === drafted ? all : kept || "none";
  return `${draft}; one forward of the target checked ${them} and accepted ${verdict}`;
}

function drawTimes(step, index) {
  const longest = Math.max(...steps.slice(1).map((each) => each.draft_seconds + each.target_seconds), 1e-9);
  const width = (seconds) => `width:${Math.min(100, (100 * seconds) / longest)}%`;
  const part = (name, seconds) => element("i", { class: name, style: width(seconds) });
  const key = (name, seconds, words) => [element("b", { class: name }), `${words} ${time(seconds)}`];
  byId("times").replaceChildren(
    element("div", { class: "bar" }, part("draft", step.draft_seconds), part("target", step.target_seconds)),
    ...key("draft", step.draft_seconds, "draft"),
    ...key("target", step.target_seconds, index ? "target forward" : "target forward, with the end of the prompt"));
}

function drawRunning(step, index) {
  const done = steps.slice(0, index + 1), sum = (of) => done.reduce((total, each) => total + of(each), 0);
  const written = step.first + step.count, kept = sum((each) => each.path.length);
  figures("running", [
    ["tokens so far", written], ["forwards so far", done.length],
    ["tokens a forward", (written / done.length).toFixed(2)],
    ["accepted of drafted", share(kept, sum((each) => each.nodes.length))],
    ["time so far", time(sum((each) => each.draft_seconds + each.target_seconds))]]);
}

function drawContext(step) {
  const before = tokens.slice(Math.max(0, step.first - 64), step.first).map((token) => token.text).join("");
  byId("context").replaceChildren(element("bdi", {}, (record.context + before).replace(/\n/g, "↵").slice(-240)));
}

function go(index) {
  current = Math.max(0, Math.min(steps.length - 1, index));
  const step = steps[current];
  byId("slider").value = current;
  byId("place").textContent = `step ${current + 1} of ${steps.length}`;
  byId("story").replaceChildren(...story(step, current));
  for (const draw of [drawContext, drawTree, drawTimes, drawRunning]) draw(step, current);
  [...byId("strip").children].forEach((bar, i) => bar.classList.toggle("now", i === current));
  markAnswer();
}

function markAnswer() {
  const answer = byId("answer");
  for (const token of answer.children) {
    token.classList.toggle("now", Number(token.dataset.step) === current);
    token.classList.toggle("ahead", Number(token.dataset.step) > current);
  }
  const top = answer.querySelector(".now").getBoundingClientRect().top - answer.getBoundingClientRect().top;
  if (top < 0 || top > answer.clientHeight - 40) answer.scrollTop += top - answer.clientHeight / 2;
}

function tokenText({ text, label, origin }) {
  if (!text) return [element("span", { class: "mark", title: label }, "◦")];
  const bare = text.includes("\n") && !text.trim(); // a lone line break has nothing to show a colour on
  const solid = origin === "correction" || origin === "bonus";
  return bare && solid ? [element("span", { class: "mark" }, "↵"), text] : [text];
}

function tokenSpan(token) {
  const title = `step ${token.step + 1}: ${MEANING[token.origin]}`;
  return element("span", { class: `token ${token.origin}`, "data-step": token.step, title }, ...tokenText(token));
}

function stripBar(step, index) {
  const own = ownToken(step)?.origin ?? "accepted";
  const style = `--tokens:${step.count};--kept:${step.path.length};--own:var(--${own})`;
  return element("i", { style, "data-step": index });
}

function legendEntry([origin, meaning]) {
  const part = element("small", {}, share(totals.origins[origin] ?? 0, totals.tokens));
  return element("li", { title: meaning }, element("span", { class: `token ${origin}` }, origin), " ", part);
}

function play(on) {
  clearInterval(playing);
  const next = () => (current < steps.length - 1 ? go(current + 1) : play(false));
  playing = on ? setInterval(next, SECONDS_A_STEP * 1000) : null;
  byId("play").textContent = on ? "❚❚" : "▶";
  if (on) go(current < steps.length - 1 ? current + 1 : 0);
}

const jump = (index) => (play(false), go(index));
const stepOf = (event) => event.target.closest("[data-step]")?.dataset.step;
const linked = () => (Number(location.hash.slice(1)) || 1) - 1; // page.html#12 opens step 12
const KEYS = {
  ArrowLeft: () => jump(current - 1), ArrowRight: () => jump(current + 1),
  Home: () => jump(0), End: () => jump(steps.length - 1), " ": () => play(!playing),
};

function onKey(event) {
  const act = KEYS[event.key];
  const pressed = event.key === " " && event.target.closest?.("button"); // the button answers to it already
  if (!act || pressed || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
}

function onClick(event) {
  if (stepOf(event)) jump(Number(stepOf(event)));
}

function onHover(event) {
  const step = stepOf(event);
  for (const token of byId("answer").children) token.classList.toggle("peer", token.dataset.step === step);
}

function listen() {
  for (const place of ["answer", "strip"]) byId(place).addEventListener("click", onClick);
  for (const type of ["mouseover", "mouseleave"]) byId("answer").addEventListener(type, onHover);
  byId("back").addEventListener("click", KEYS.ArrowLeft);
  byId("next").addEventListener("click", KEYS.ArrowRight);
  byId("play").addEventListener("click", KEYS[" "]);
  byId("slider").addEventListener("input", (event) => jump(Number(event.target.value)));
  addEventListener("keydown", onKey);
  addEventListener("resize", () => drawTree(steps[current]));
  addEventListener("hashchange", () => jump(linked()));
}

function build() {
  document.title = `${record.prompt.slice(0, 60)} · paceline explain`;
  byId("prompt").textContent = record.prompt;
  byId("setup").textContent = Object.entries(record.setup).map(([name, value]) => `${name} ${value}`).join(" · ");
  figures("totals", [
    ["tokens a forward", totals.tokens_per_forward.toFixed(2)], ["tokens/s", totals.tokens_per_second.toFixed(1)],
    ["accepted of drafted", share(totals.accepted, totals.drafted)], ["tokens", totals.tokens],
    ["forwards", totals.steps]]);
  byId("legend").append(...Object.entries(MEANING).map(legendEntry));
  byId("answer").append(...tokens.map(tokenSpan));
  byId("strip").append(...steps.map(stripBar));
  byId("strip").style.setProperty("--most", Math.max(...steps.map((step) => step.count)));
  byId("slider").max = steps.length - 1;
}

if (steps.length) {
  build();
  listen();
  play(false);
  go(location.hash ? linked() : Math.max(0, steps.findIndex((step) => step.nodes.length)));
}
