// Rows of tokens: the one that is pointed at or has the focus, what it sees, and what sees it.
(() => {
  "use strict";
  const [TEXT, ID, SEGMENT, POSITION, LABEL, READOUTS, SEES] = [0, 1, 2, 3, 4, 5, 6];

  function make(tag, className, text) {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  }

  const rows = (ranges) => ranges.map(([first, end]) => (end === first + 1 ? `${first}` : `${first}–${end - 1}`)).join(", ");

  // Ascending rows as ranges.
  function ranges(numbers) {
    const found = [];
    for (const number of numbers) {
      if (found.length && found.at(-1)[1] === number) found.at(-1)[1] = number + 1;
      else found.push([number, number + 1]);
    }
    return found;
  }

  function inspector(root) {
    const { records, choices, own } = JSON.parse(document.getElementById(`${root.dataset.inspector}-data`).textContent);
    const form = root.querySelector("form");
    const record = form.elements.record;
    const [holder, detail] = [root.querySelector(".inspector-row"), root.querySelector(".inspector-detail")];
    let row, buttons, current;

    const sees = (query, key) => row.tokens[query][SEES].some(([first, end]) => first <= key && key < end);

    function tell(at) {
      const token = row.tokens[at];
      const segment = row.segments[token[SEGMENT]];
      const seeing = ranges(row.tokens.map((_, other) => other).filter((other) => sees(other, at)));
      const told = {
        token: `${token[TEXT]} (id ${token[ID]})`,
        row: at,
        position: token[POSITION],
        segment: `${token[SEGMENT]} ${segment.name}: ${segment.where}`,
        "must predict": token[LABEL] === null ? "nothing" : token[LABEL],
        "read here": token[READOUTS] || "nothing",
        "sees rows": rows(token[SEES]),
        "is seen by rows": rows(seeing),
      };
      detail.replaceChildren(...Object.entries(told).map(([name, value]) => {
        const pair = make("div", "", "");
        pair.append(make("dt", "", name), make("dd", "", String(value)));
        return pair;
      }));
    }

    function highlight(at) {
      buttons.forEach((button, other) => {
        const [seen, seeing] = [sees(at, other), sees(other, at)];
        button.classList.toggle("inspector-current", other === at);
        button.classList.toggle("inspector-seen", seen && other !== at);
        button.classList.toggle("inspector-seeing", seeing && other !== at);
        button.classList.toggle("inspector-faded", !seen && !seeing);
      });
      tell(at);
    }

    // One token is in the order of Tab; the arrow keys choose which.
    function choose(at, focus) {
      buttons[current].tabIndex = -1;
      current = at;
      buttons[at].tabIndex = 0;
      if (focus) buttons[at].focus();
      highlight(at);
    }

    function draw() {
      row = records[Number(record.value)].rows[form.elements.count.value];
      buttons = row.tokens.map((token) => {
        const button = make("button", "inspector-token", token[TEXT]);
        button.type = "button";
        button.tabIndex = -1;
        if (token[READOUTS]) {
          button.classList.add("inspector-readout");
          button.append(make("sup", "", token[READOUTS]));
        }
        return button;
      });
      let start = 0;
      holder.replaceChildren(...row.segments.map((segment, number) => {
        const block = make("div", `inspector-segment inspector-${segment.kind}-${segment.hue}`, "");
        const line = make("div", "inspector-tokens", "");
        for (const button of buttons.slice(start, segment.end)) {
          line.append(button);
          if (row.tokens[buttons.indexOf(button)][TEXT].endsWith("⏎")) line.append(document.createElement("br"));
        }
        block.append(make("h4", "", `${number} ${segment.name}`), make("p", "", segment.where), line);
        start = segment.end;
        return block;
      }));
      const read = row.tokens.findIndex((token) => token[READOUTS]);
      current = 0;
      choose(read < 0 ? row.tokens.length - 1 : read, false);
    }

    function onKey(event) {
      const ends = [0, ...row.segments.map((segment) => segment.end)];
      const segment = row.tokens[current][SEGMENT];
      const to = {
        ArrowLeft: current - 1, ArrowRight: current + 1, Home: ends[segment], End: ends[segment + 1] - 1,
        ArrowUp: segment ? ends[segment - 1] : current, ArrowDown: ends[segment + 1],
      }[event.key];
      if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      if (to >= 0 && to < buttons.length) choose(to, true);
    }

    const at = (event) => buttons.indexOf(event.target.closest(".inspector-token"));
    holder.addEventListener("keydown", onKey);
    holder.addEventListener("mouseover", (event) => at(event) >= 0 && highlight(at(event)));
    holder.addEventListener("mouseleave", () => highlight(current));
    holder.addEventListener("click", (event) => at(event) >= 0 && choose(at(event), true));
    form.addEventListener("change", draw);
    form.addEventListener("submit", (event) => event.preventDefault());
    records.forEach(({ index, line }, place) => record.add(new Option(`${index} (line ${line})`, String(place))));
    for (const count of choices) {
      const [label, radio] = [make("label", "", ""), make("input", "", "")];
      Object.assign(radio, { type: "radio", name: "count", value: String(count), checked: count === own });
      label.append(radio, ` ${count}${count === own ? " (this run)" : ""}`);
      form.querySelector("fieldset").append(label);
    }
    draw();
  }

  for (const root of document.querySelectorAll("[data-inspector]:not([data-ready])")) {
    root.dataset.ready = "yes";
    if (document.getElementById(`${root.dataset.inspector}-data`)) inspector(root);
  }
})();
