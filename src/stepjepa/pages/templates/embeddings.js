// Gives the charts of points their traces, by what colours them; charts.js draws them.
(() => {
  "use strict";
  const { charts, points, palette } = JSON.parse(document.getElementById("scatter-data").textContent);
  const select = document.querySelector(".scatter select");

  function traces({ x, y, points: number }) {
    const { target, text, colourings } = points[number];
    const { names, of, grey } = colourings[select.value] ?? { names: ["not known"], of: text.map(() => 0), grey: 1 };
    return names.map((name, place) => {
      const chosen = of.flatMap((each, point) => (each === place ? [point] : []));
      const pick = (values) => chosen.map((point) => values[point]);
      return {
        type: "scatter", mode: "markers", name, x: pick(x), y: pick(y), text: pick(text), hoverinfo: "text", showlegend: true,
        marker: {
          color: place < grey ? "#999999" : palette[(place - grey) % palette.length],
          size: 7, opacity: 0.7, symbol: pick(target).map((each) => (each ? "triangle-up" : "circle")),
        },
      };
    });
  }

  function colour() {
    for (const [id, chart] of Object.entries(charts)) {
      const block = document.getElementById(`${id}-data`);
      block.textContent = JSON.stringify({ ...JSON.parse(block.textContent), data: traces(chart) });
    }
  }

  select.addEventListener("change", () => {
    colour();
    // To be drawn again, as when the theme changes.
    document.dispatchEvent(new Event("themechange"));
  });
  colour();
})();
