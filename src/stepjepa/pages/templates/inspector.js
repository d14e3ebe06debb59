// A tree of tokens: the one that is pointed at or has the focus, what it sees, and what sees it.
(() => {
  "use strict";
  const [TEXT, ID, BRANCH, POSITION, LABEL, READOUTS, START, END] = [0, 1, 2, 3, 4, 5, 6, 7];

  function make(tag, className, text) {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  }

  const told = (ranges) => ranges.map(([first, end]) => (end === first + 1 ? `${first}` : `${first}–${end - 1}`)).join(", ");

  // Ascending numbers as ranges.
  function ranges(numbers) {
    const found = [];
    for (const number of numbers) {
      if (found.length && found.at(-1)[1] === number) found.at(-1)[1] = number + 1;
      else found.push([number, number + 1]);
    }
    return found;
  }

  function inspector(root) {
    const { records, choices, own } = JSON.parse(document.getElementById("inspector-data").textContent);
    const form = root.querySelector("form");
    const record = form.elements.record;
    const [holder, detail] = [root.querySelector(".inspector-tree"), root.querySelector(".inspector-detail")];
    let tree, buttons, current;

    const sees = (query, key) => tree.tokens[query][START] <= key && key <= query && query < tree.tokens[key][END];

    function tell(at) {
      const token = tree.tokens[at];
      const branch = tree.branches[token[BRANCH]];
      const those = (test) => told(ranges(tree.tokens.map((_, other) => other).filter(test)));
      const found = {
        token: `${token[TEXT]} (id ${token[ID]})`,
        place: at,
        position: token[POSITION],
        branch: `${token[BRANCH]}, of ${branch.name}: ${branch.where}`,
        "must predict": token[LABEL] === null ? "nothing" : token[LABEL],
        "read here": token[READOUTS] || "nothing",
        sees: those((other) => sees(at, other)),
        "is seen by": those((other) => sees(other, at)),
      };
      detail.replaceChildren(...Object.entries(found).map(([name, value]) => {
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
      tree = records[Number(record.value)].trees[form.elements.count.value];
      buttons = tree.tokens.map((token) => {
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
      holder.replaceChildren(...tree.branches.map((branch, number) => {
        const block = make("div", `inspector-branch inspector-${branch.kind}`, "");
        const line = make("div", "inspector-tokens", "");
        for (const button of buttons.slice(start, branch.end)) {
          line.append(button);
          if (tree.tokens[buttons.indexOf(button)][TEXT].endsWith("⏎")) line.append(document.createElement("br"));
        }
        block.append(make("h4", "", `${number} ${branch.name}`), make("p", "", branch.where), line);
        start = branch.end;
        return block;
      }));
      const read = tree.tokens.findIndex((token) => token[READOUTS]);
      current = 0;
      choose(read < 0 ? tree.tokens.length - 1 : read, false);
    }

    function onKey(event) {
      const ends = [0, ...tree.branches.map((branch) => branch.end)];
      const branch = tree.tokens[current][BRANCH];
      const to = {
        ArrowLeft: current - 1, ArrowRight: current + 1, Home: ends[branch], End: ends[branch + 1] - 1,
        ArrowUp: branch ? ends[branch - 1] : current, ArrowDown: ends[branch + 1],
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

  inspector(document.querySelector(".inspector"));
})();
