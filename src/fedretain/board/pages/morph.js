// Turns the content of an element into new content by changing as little as possible: what is open stays open, what has
// the focus keeps it, a chart is changed in place, and a slider stays at the round that its reader chose.

// Sections, figures and folded texts are known by their heading wherever they stand; everything else by its place.
const heading = (node) =>
  node.nodeType === Node.ELEMENT_NODE && node.matches("section, figure, details")
    ? node.querySelector("h2, figcaption, summary")?.textContent
    : null;

const alike = (a, b) => a.nodeName === b.nodeName && heading(a) === heading(b);

export function morph(target, source) {
  const left = [...target.childNodes];
  let place = target.firstChild;
  for (const wanted of [...source.childNodes]) {
    const at = left.findIndex((node) => alike(node, wanted));
    if (at < 0) {
      target.insertBefore(wanted, place);
      continue;
    }
    const [node] = left.splice(at, 1);
    if (node !== place) target.insertBefore(node, place);
    place = node.nextSibling;
    change(node, wanted);
  }
  for (const node of left) {
    for (const chart of node.querySelectorAll?.(".js-plotly-plot") ?? []) Plotly.purge(chart);
    node.remove();
  }
}

function change(node, wanted) {
  if (node.nodeType !== Node.ELEMENT_NODE) {
    if (node.nodeValue !== wanted.nodeValue) node.nodeValue = wanted.nodeValue;
  } else if (node.matches(".chart")) {
    node.dataset.figure = wanted.dataset.figure;
    node.style.height = wanted.style.height;
  } else if (node.matches(".slider")) {
    slide(node, wanted);
  } else {
    copyAttributes(node, wanted);
    morph(node, wanted);
  }
}

function copyAttributes(node, wanted) {
  for (const { name } of [...node.attributes]) {
    if (!wanted.hasAttribute(name) && name !== "open") node.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
}

// Who looks at the newest round goes on to the next; who looks at another stays there, or at the nearest still shown.
function slide(node, wanted) {
  const input = node.querySelector("input");
  const rounds = JSON.parse(node.dataset.rounds);
  const next = JSON.parse(wanted.dataset.rounds);
  const chosen = rounds[Number(input.value)];
  const distance = (round) => Math.abs(round - chosen);
  const nearest = next.reduce((best, round, n) => (distance(round) < distance(next[best]) ? n : best), 0);
  const newest = Number(input.value) === rounds.length - 1;
  node.dataset.rounds = wanted.dataset.rounds;
  input.max = next.length - 1;
  input.value = newest ? next.length - 1 : nearest;
}
