// Keeps a page up to date: asks again and again, hears "nothing new" cheaply, and says when nobody answers.

const SHORTEST = 2000;
const LONGEST = 10000;

// Calls `receive` with every new answer of `url`, and `gone` when there is none any more.
export async function follow(url, receive, gone) {
  const live = document.getElementById("live");
  let tag = null;
  for (;;) {
    const started = performance.now();
    const answer = await ask(url, tag);
    if (answer === null) {
      say(live, "lost", "The board does not answer. Is it still running? Trying again …");
    } else {
      say(live, "live", "Live");
      if (answer.status === 200) {
        tag = answer.tag;
        await receive(answer.content);
      } else if (answer.status !== 304) {
        tag = null;
        gone(answer.status, answer.content?.error);
      }
    }
    // A page that takes long to make is asked for less often, so that watching a run does not slow it down.
    const took = performance.now() - started;
    await pause(Math.min(Math.max(SHORTEST, 3 * took), LONGEST));
  }
}

// The answer with its content, or null when there is none or it breaks off.
async function ask(url, tag) {
  try {
    const answer = await fetch(url, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    const isData = answer.headers.get("Content-Type") === "application/json";
    return { status: answer.status, tag: answer.headers.get("ETag"), content: isData ? await answer.json() : null };
  } catch {
    return null;
  }
}

function say(live, state, words) {
  if (live.dataset.state === state) return;
  live.dataset.state = state;
  live.textContent = words;
}

// The time, and then until somebody looks.
async function pause(milliseconds) {
  await new Promise((done) => setTimeout(done, milliseconds));
  while (document.hidden) {
    await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
  }
}

export const STATUSES = ["running", "finished", "interrupted", "unreadable"];

// An element with text or children; nothing is ever read as HTML.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const address = (id) => `/run/${id.split("/").map(encodeURIComponent).join("/")}`;

export const status = (run) => element("span", { class: `status ${run.status}` }, run.status);

export function progress(run) {
  if (!run.rounds) return element("span", { class: "progress" }, run.round ? `${run.round}` : "–");
  const words = `${run.round} / ${run.rounds}`;
  const bar = element("progress", { max: run.rounds, value: Math.min(run.round, run.rounds), "aria-label": `round ${run.round} of ${run.rounds}` });
  return element("span", { class: "progress" }, bar, element("span", { "aria-hidden": "true" }, words));
}

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
