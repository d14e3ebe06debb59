// Before anything is drawn: the theme that the reader chose, otherwise that of the system.
(() => {
  "use strict";
  const key = "stepjepa-theme";
  const root = document.documentElement;
  // A browser may refuse to keep anything for a file.
  const kept = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const keep = (theme) => { try { localStorage.setItem(key, theme); } catch { /* for this visit alone */ } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const say = () => button.setAttribute("aria-pressed", String(dark()));
    button.hidden = false;
    say();
    system.addEventListener("change", say);
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      keep(root.dataset.theme);
      say();
    });
  });
})();
