// Glue by hand, not a table library: DataTables and its like bring half a megabyte, build cells from HTML strings (what
// a model wrote would have to be escaped at every column) and know nothing of two runs side by side. Here everything
// that was read reaches the page by textContent, and only the cards of one page are ever in the document.
(() => {
  "use strict";
  const PAGE = 20;
  const [INDEX, PROMPT, TRUTH, GENERATED, RIGHT, STOPPED, ERROR, SCORES] = [0, 1, 2, 3, 4, 5, 6, 7];
  const root = document.getElementById("answers-browser");
  const evaluations = JSON.parse(document.getElementById("answers-data").textContent);
  const form = root.querySelector("form");
  const { first, second, verdict, differ, search } = form.elements;
  const verdicts = {
    "": () => true,
    right: (answer) => answer[RIGHT] === true,
    wrong: (answer) => answer[RIGHT] === false,
    "ran on": (answer) => answer[STOPPED] === false,
  };
  const differs = {
    "": () => true,
    verdict: (one, other) => one[RIGHT] !== other[RIGHT],
    text: (one, other) => one[GENERATED] !== other[GENERATED],
  };
  const haystacks = new Map();
  let found = [], page = 0;

  const part = (holder, name) => holder.querySelector(`[data-part="${name}"]`);
  const name = (evaluation) => `${evaluation.run} · ${evaluation.name}`;
  const chosen = (select) => (select.value === "" ? null : evaluations[Number(select.value)]);
  const count = (number) => number.toLocaleString("en");

  function option(select, value, text) {
    select.add(new Option(text, value));
  }

  function haystack(answer) {
    let text = haystacks.get(answer);
    if (text === undefined) {
      text = [answer[PROMPT], answer[TRUTH], answer[GENERATED]].join("\n").toLowerCase();
      haystacks.set(answer, text);
    }
    return text;
  }

  // A text with what was searched for marked.
  function fill(element, text, needle) {
    const lower = text.toLowerCase();
    let from = 0;
    // Where lower case has another length, places in it mean nothing.
    while (needle && lower.length === text.length) {
      const at = lower.indexOf(needle, from);
      if (at < 0) break;
      const mark = document.createElement("mark");
      mark.textContent = text.slice(at, at + needle.length);
      element.append(text.slice(from, at), mark);
      from = at + needle.length;
    }
    element.append(text.slice(from) || (text ? "" : "(nothing)"));
  }

  function said(evaluation, answer, needle) {
    const holder = document.getElementById("answers-answer").content.cloneNode(true);
    const right = answer[RIGHT] === null ? "no verdict" : answer[RIGHT] ? "right" : "wrong";
    const more = [answer[STOPPED] === false ? "ran on" : "", answer[ERROR]].filter((text) => text && text !== "wrong answer");
    part(holder, "run").textContent = name(evaluation);
    part(holder, "verdict").textContent = [...new Set([right, ...more])].join(" · ");
    part(holder, "verdict").className = `answers-${right.replace(" ", "-")}`;
    fill(part(holder, "generated"), answer[GENERATED], needle);
    const scores = answer[SCORES].map((value, place) => `${evaluation.scores[place]} ${value === null ? "–" : value}`);
    part(holder, "scores").textContent = scores.join(" · ");
    return holder;
  }

  function draw() {
    const [one, other, needle] = [chosen(first), chosen(second), search.value.toLowerCase()];
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const cards = found.slice(page * PAGE, (page + 1) * PAGE).map(([answer, beside]) => {
      const card = document.getElementById("answers-card").content.cloneNode(true);
      card.querySelector("h3").textContent = `Example ${answer[INDEX]}`;
      fill(part(card, "prompt"), answer[PROMPT], needle);
      fill(part(card, "truth"), answer[TRUTH], needle);
      card.querySelector(".answers-said").append(said(one, answer, needle), beside ? said(other, beside, needle) : "");
      return card;
    });
    root.querySelector(".answers-list").replaceChildren(...cards);
    root.querySelector(".answers-pager span").textContent = `page ${count(page + 1)} of ${count(pages)}`;
    const [back, on] = root.querySelectorAll(".answers-pager button");
    [back.disabled, on.disabled] = [page === 0, page === pages - 1];
  }

  function update() {
    const [one, other, needle] = [chosen(first), chosen(second), search.value.toLowerCase()];
    const beside = other && new Map(other.answers.map((answer) => [answer[INDEX], answer]));
    const pairs = one.answers.map((answer) => [answer, beside && beside.get(answer[INDEX])]);
    const both = beside ? pairs.filter(([, answer]) => answer) : pairs;
    found = both.filter(([answer, mate]) =>
      verdicts[verdict.value](answer) && (!mate || differs[differ.value](answer, mate)) &&
      (!needle || haystack(answer).includes(needle) || (mate && haystack(mate).includes(needle))));
    page = 0;
    root.querySelector(".answers-status").textContent = `${count(found.length)} of ${count(both.length)} answers`;
    draw();
  }

  function choose() {
    const [one, before] = [chosen(first), [second.value, verdict.value]];
    second.replaceChildren();
    option(second, "", "nothing");
    evaluations.forEach((each, place) => each !== one && each.test === one.test && option(second, String(place), name(each)));
    verdict.replaceChildren();
    for (const [value, holds] of Object.entries(verdicts)) {
      option(verdict, value, `${value || "any"} (${count(one.answers.filter(holds).length)})`);
    }
    [second.value, verdict.value] = before;
    if (second.selectedIndex < 0) second.value = "";
    if (verdict.selectedIndex < 0) verdict.value = "";
    second.disabled = second.length === 1;
    const decides = one.headline ? `Right by ${one.headline}. ` : "";
    const samples = one.samples > 1 ? `Of ${one.samples} samples the one most agree with is shown; scores are means.` : "";
    root.querySelector(".answers-note").textContent = decides + samples;
    const ends = root.querySelector(".answers-begin");
    ends.hidden = !one.begin && !one.end;
    for (const which of ["begin", "end"]) {
      part(ends, which).textContent = one[which];
      part(ends, which).hidden = !one[which];
    }
  }

  function change(event) {
    // Typing has told already; it is told once more when the field is left.
    if (event.target === search) return;
    if (event.target === first) choose();
    root.classList.toggle("answers-beside", second.value !== "");
    if (second.value === "") differ.value = "";
    update();
  }

  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 150);
  });
  form.addEventListener("change", change);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    update();
  });
  root.querySelector(".answers-pager").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    page += Number(button.dataset.step);
    draw();
    // A button that was disabled has no focus any more, and keys would start from the top of the page.
    if (button.disabled) root.querySelector(".answers-pager button:enabled")?.focus();
    root.querySelector(".answers-status").scrollIntoView({ block: "start" });
  });

  evaluations.forEach((each, place) => option(first, String(place), name(each)));
  first.value = "0";
  choose();
  update();
})();
