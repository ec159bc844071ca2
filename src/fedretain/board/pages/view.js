// The page of one run or of several: the report's own sections and pictures, changed in place as the runs go on.
import { STATUSES, address, element, follow, plural, progress, status } from "./follow.js";
import { morph } from "./morph.js";

const [title, states, problems, content, said] = ["title", "states", "problems", "report", "said"].map((id) =>
  document.getElementById(id),
);
const FEW = 6;

const single = location.pathname.startsWith("/run/");
const chosen = single
  ? [decodeURIComponent(location.pathname.slice("/run/".length))]
  : [...new Set(new URLSearchParams(location.search).getAll("run"))];
const query = new URLSearchParams(chosen.map((id) => ["run", id]));

function stateLine(run) {
  const name = single ? element("span", { class: "place" }, run.id) : element("a", { class: "place", href: address(run.id) }, run.id);
  const young = run.status === "running" && run.round === 0 ? element("span", { class: "note" }, "The first round is not over yet; pictures come with it.") : null;
  const resume = run.resume
    ? element("p", { class: "resume" }, "Go on with: ", element("code", {}, run.resume))
    : null;
  return element("li", { class: run.status }, status(run), progress(run), name, young, resume);
}

function showStates(runs) {
  const list = element("ul", { class: "states" }, ...runs.map(stateLine));
  const counts = STATUSES.map((one) => [one, runs.filter((run) => run.status === one).length]).filter(([, count]) => count);
  const words = `${plural(runs.length, "run")}: ${counts.map(([one, count]) => `${count} ${one}`).join(", ")}`;
  const parts = document.createDocumentFragment();
  if (runs.length <= FEW) parts.append(list);
  else parts.append(element("details", {}, element("summary", {}, words), list));
  // The summary tells the counts, which change: the folded list is told by being the only one.
  const open = states.querySelector("details")?.open;
  morph(states, parts);
  if (open) states.querySelector("details")?.setAttribute("open", "");
}

function showProblems(found) {
  const parts = document.createDocumentFragment();
  if (found.length) {
    const lines = found.map((problem) => element("li", {}, problem));
    parts.append(element("div", { class: "problems", role: "note" }, element("strong", {}, "What cannot be shown"), element("ul", {}, ...lines)));
  }
  morph(problems, parts);
}

let before = new Map();
function announce(runs) {
  const changed = runs.filter((run) => before.has(run.id) && before.get(run.id) !== run.status);
  if (changed.length) said.textContent = changed.map((run) => `${run.id}: ${run.status}`).join("; ");
  before = new Map(runs.map((run) => [run.id, run.status]));
}

async function receive(answer) {
  document.title = `${answer.title} – fedretain`;
  title.textContent = answer.title;
  showStates(answer.runs);
  showProblems(answer.problems);
  announce(answer.runs);
  // The report escapes every text of a run; the page's content policy runs no script that might still be in it.
  const parts = document.createElement("template");
  parts.innerHTML = answer.html;
  morph(content, parts.content);
  await report.show(answer.figures);
}

function gone(code, words) {
  const away = single ? `${chosen[0]}: no longer there. What is shown is the last that was seen of it.` : "None of these runs is there any more.";
  showProblems([code === 404 ? away : words || `The board could not answer (${code}).`]);
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.defaultPrevented) location.assign(document.getElementById("back").href);
});

follow(`/api/report?${query}`, receive, gone);
