// Draws the figures of the page, lets a section's slider choose the round that its heatmaps show, and saves the data of
// a figure as CSV. A page whose content changes while it is open calls `report.show` with the new figures.
"use strict";
const report = (() => {
  let figures = [];
  const charts = () => [...document.querySelectorAll(".chart")];
  const settings = { responsive: true, displaylogo: false };

  function draw(chart) {
    const { data, layout, frames = [] } = figures[Number(chart.dataset.figure)];
    const frame = frames.find((one) => one.name === chart.dataset.round);
    const traces = data.map((trace, n) => ({ ...trace, ...(frame ? frame.data[n] : {}) }));
    const ink = getComputedStyle(document.body).color;
    chart.closest("figure").classList.toggle("absent", "round" in chart.dataset && !frame);
    // What a reader zoomed into stays when a curve grows; another round of a heatmap starts afresh.
    const shown = { ...layout, font: { ...layout.font, color: ink }, uirevision: chart.dataset.round ?? "curve" };
    for (const [axis, range] of Object.entries(frame?.layout ?? {})) {
      shown[axis] = { ...layout[axis], ...range };
    }
    return Plotly.react(chart, traces, shown, settings);
  }

  // Takes over the round that the slider stands at; returns the charts that it concerns.
  function choose(slider) {
    const round = String(JSON.parse(slider.dataset.rounds)[Number(slider.querySelector("input").value)]);
    slider.querySelector("output").textContent = round;
    const sliding = [...slider.parentElement.querySelectorAll(".chart")];
    for (const chart of sliding) chart.dataset.round = round;
    return sliding;
  }

  // Plotly reads a little HTML, so the figures' texts are escaped; a file shows them as written.
  const plain = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

  // The figure's data as a table: a line for each cell of every round, each piece of a bar, or each point of a curve.
  function records({ data, layout, frames = [] }) {
    const [x, y] = [layout.xaxis.title.text, layout.yaxis.title.text];
    if (data[0]?.type === "heatmap") {
      const cells = (map, ...before) =>
        map.y.flatMap((row, i) => map.x.map((column, k) => [...before, plain(row), column, map.z[i][k]]));
      const head = [y, x, data[0].colorbar.title.text];
      if (frames.length === 0) return [head, ...cells(data[0])];
      return [["round", ...head], ...frames.flatMap(({ name, data: [map] }) => cells(map, name))];
    }
    if (data[0]?.type === "bar") {
      const bars = data.filter((trace) => trace.type === "bar");
      const pieces = bars.flatMap((bar) =>
        bar.y.map((row, n) => [row, plain(bar.name), bar.customdata[n][0], bar.x[n]]),
      );
      return [[y, "class", "training examples", x], ...pieces];
    }
    const lines = data.filter((trace) => trace.fill !== "toself");
    const further = [...new Set(lines.flatMap((line) => Object.keys(line.meta ?? {})))];
    const points = lines.flatMap((line) =>
      line.x.map((at, n) => [plain(line.name), at, line.y[n], ...further.map((name) => line.meta?.[name]?.[n])]),
    );
    return [["curve", x, y, ...further], ...points];
  }

  // RFC 4180: a cell with a comma, quote or line break stands in quotes; what was not measured stays empty.
  function csv(rows) {
    const cell = (value) => {
      const text = String(value ?? "");
      return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
    };
    return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
  }

  function save(figure) {
    const content = csv(records(figures[Number(figure.querySelector(".chart").dataset.figure)]));
    const link = document.createElement("a");
    const words = figure.querySelector("figcaption").textContent.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
    link.download = `${words.join("-").slice(0, 80) || "data"}.csv`;
    link.href = URL.createObjectURL(new Blob([content], { type: "text/csv;charset=utf-8" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  // Draws the charts that are in the page now; those drawn before are changed in place.
  async function show(next) {
    figures = next;
    for (const slider of document.querySelectorAll(".slider")) choose(slider);
    await Promise.all(charts().map(draw));
    document.documentElement.dataset.drawn = "yes";
  }

  document.addEventListener("input", (event) => {
    const slider = event.target.closest(".slider");
    if (slider) choose(slider).forEach(draw);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.data");
    if (button) save(button.closest("figure"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts().forEach(draw));
  return { show };
})();
{
  const embedded = document.getElementById("figures");
  if (embedded) report.show(JSON.parse(embedded.textContent));
}
