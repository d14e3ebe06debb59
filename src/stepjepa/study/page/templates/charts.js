// Draws the elements that charts.py writes: when they come into view, in the colours of the page. Each tells when it
// was drawn, by the event "drawn".
(() => {
  "use strict";
  // Where there is no mouse a finger scrolls the page, and a tap tells the numbers.
  const touch = matchMedia("(hover: none)").matches;
  const unused = ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"];
  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: unused, ...(touch && {displayModeBar: false})};
  const hidden = new Set();
  const all = () => document.querySelectorAll(".chart");

  const dressed = (element, layout) => {
    const style = getComputedStyle(element);
    const narrow = element.clientWidth < 480;
    const axis = {gridcolor: style.borderTopColor, zerolinecolor: style.borderTopColor, linecolor: style.borderTopColor};
    const result = {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)"};
    result.font = {size: 12, ...layout.font, color: style.color, family: style.fontFamily};
    result.hoverlabel = {align: "left", namelength: -1, ...layout.hoverlabel, bgcolor: style.backgroundColor,
                         bordercolor: style.borderTopColor, font: {color: style.color}};
    if (touch) result.dragmode = false;
    result.modebar = {bgcolor: "rgba(0,0,0,0)", color: style.borderTopColor, activecolor: style.color};
    for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))])) {
      result[name] = {automargin: true, ...layout[name], ...axis};
      // On a phone long names would leave no room.
      if (narrow) result[name].ticktext = result[name].ticktext?.map((text) => text.length <= 18 || text.includes("&") ? text : `…${text.slice(-17)}`);
    }
    return result;
  };

  // The library is large: it stands in the page as text, and becomes a script once the page is there to be read.
  const load = () => {
    if (typeof Plotly !== "undefined") return;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  };

  const draw = (element) => {
    load();
    const {data, layout} = JSON.parse(document.getElementById(`${element.id}-data`).textContent);
    for (const trace of data) {
      if (trace.meta?.run !== undefined) trace.visible = !hidden.has(trace.meta.run);
    }
    element.dataset.drawn = "yes";
    Plotly.react(element, data, dressed(element, layout), config);
    element.dispatchEvent(new Event("drawn"));
  };
  const again = () => all().forEach((element) => element.dataset.drawn && draw(element));

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !entry.target.dataset.drawn) draw(entry.target);
    }
  }, {rootMargin: "400px"});
  const watch = () => setTimeout(() => all().forEach((element) => seen.observe(element)));
  if (document.readyState === "complete") watch(); else addEventListener("load", watch);

  // The boxes of runs in every section stand for the same choice.
  const boxes = document.querySelectorAll("[data-legend] input");
  boxes.forEach((box) => box.addEventListener("change", () => {
    if (box.checked) hidden.delete(box.value); else hidden.add(box.value);
    boxes.forEach((other) => { if (other.value === box.value) other.checked = box.checked; });
    again();
  }));

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  document.addEventListener("themechange", again);
  // What has not been in view would be missing on paper.
  addEventListener("beforeprint", () => all().forEach((element) => element.dataset.drawn || draw(element)));
})();
