// Draws the figures of the page and lets a section's slider choose the round that its heatmaps show.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const charts = [...document.querySelectorAll(".chart")];
  const settings = { responsive: true, displaylogo: false };

  function draw(chart) {
    const { data, layout, frames = [] } = figures[Number(chart.dataset.figure)];
    const frame = frames.find((one) => one.name === chart.dataset.round);
    const traces = data.map((trace, n) => ({ ...trace, ...(frame ? frame.data[n] : {}) }));
    const ink = getComputedStyle(document.body).color;
    chart.closest("figure").classList.toggle("absent", "round" in chart.dataset && !frame);
    const shown = { ...layout, font: { ...layout.font, color: ink } };
    for (const [axis, range] of Object.entries(frame?.layout ?? {})) {
      shown[axis] = { ...layout[axis], ...range };
    }
    return Plotly.react(chart, traces, shown, settings);
  }

  for (const slider of document.querySelectorAll(".slider")) {
    const input = slider.querySelector("input");
    const output = slider.querySelector("output");
    const rounds = JSON.parse(slider.dataset.rounds);
    const sliding = [...slider.parentElement.querySelectorAll(".chart")];
    const choose = (redraw) => {
      const round = String(rounds[Number(input.value)]);
      output.textContent = round;
      for (const chart of sliding) {
        chart.dataset.round = round;
        if (redraw) draw(chart);
      }
    };
    input.addEventListener("input", () => choose(true));
    choose(false);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(draw));
  Promise.all(charts.map(draw)).then(() => {
    document.documentElement.dataset.drawn = "yes";
  });
})();
