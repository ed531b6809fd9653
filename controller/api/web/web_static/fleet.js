// The heat map: one cell a rank, ranks of a node side by side, any number of them on one screen.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("map"), maps = document.getElementById("maps");
  const LEVELS = [[1.0, "cell-0"], [1.1, "cell-1"], [1.25, "cell-2"], [1.5, "cell-3"]];
  const STATES = { silent: "cell-silent", dead: "cell-dead", finished: "cell-finished", unknown: "cell-unknown" };
  const CALM = 1.03; // below: noise, all of one colour
  let told = null;

  const mixed = (value, colours) => {
    let i = 0;
    while (i < 2 && value > LEVELS[i + 1][0]) i++;
    const [low, high] = [Math.max(CALM, LEVELS[i][0]), LEVELS[i + 1][0]];
    const part = Math.max(0, Math.min(1, (value - low) / (high - low)));
    const [a, b] = [colours[i], colours[i + 1]];
    return `rgb(${a.map((v, k) => Math.round(v + part * (b[k] - v))).join(",")})`;
  };
  const parsed = (name) => {
    const text = pk.colour(name).replace("#", "");
    return [0, 2, 4].map((i) => parseInt(text.slice(i, i + 2), 16));
  };

  const legend = document.getElementById("legend");
  for (const [label, name] of [...LEVELS.map(([l, n]) => ["\u00d7" + l.toFixed(2), n]),
    ["silent", "cell-silent"], ["dead", "cell-dead"], ["cordoned", ""]]) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.className = "swatch";
    if (name) swatch.style.background = pk.colour(name);
    else swatch.style.outline = "2px solid " + pk.colour("held");
    item.append(swatch, label);
    legend.append(item);
  }

  // Cells get smaller until all nodes fit in what is left of the screen; labels go first.
  const shape = (job, width) => {
    const sizes = new Map();
    for (const node of job.node) sizes.set(node, (sizes.get(node) || 0) + 1);
    const most = Math.max(...sizes.values(), 1);
    const across = Math.min(most, 8), down = Math.ceil(most / across);
    for (const cell of [26, 20, 16, 13, 10, 8, 6, 5, 4]) {
      const gap = cell >= 10 ? 2 : 1, label = cell >= 13 ? 15 : 0;
      const wide = across * (cell + gap) + (cell >= 8 ? 8 : 4);
      const high = down * (cell + gap) + label + (cell >= 8 ? 8 : 4);
      const columns = Math.max(1, Math.floor(width / wide));
      const height = Math.ceil(sizes.size / columns) * high;
      if (height <= 560 || cell === 4) return { cell, gap, label, wide, high, columns, across, height };
    }
  };

  const draw = () => {
    const colours = LEVELS.map(([, name]) => parsed(name));
    told.jobs.forEach((job, number) => {
      let box = maps.children[number];
      if (!box) {
        box = document.createElement("div");
        box.append(document.createElement("h3"), document.createElement("canvas"));
        box.lastChild.className = "map";
        maps.append(box);
      }
      const [title, canvas] = box.children, link = document.createElement("a");
      const slow = job.slowdown.filter((value) => value !== null && value >= 1.1).length;
      link.href = "/jobs/" + job.name;
      link.textContent = job.name;
      const words = document.createElement("span");
      words.className = "small";
      words.textContent = `${job.watch}, ${job.rank.length.toLocaleString("en")} ranks on ` +
        `${job.nodes.length.toLocaleString("en")} node${job.nodes.length === 1 ? "" : "s"}` + (slow ? `, ${slow} slow` : "");
      title.replaceChildren(link, words);
      const s = shape(job, maps.clientWidth), pen = pk.canvas(canvas, s.height);
      const at = new Map(), cells = [];
      pen.font = "10px system-ui, sans-serif";
      pen.textBaseline = "top";
      job.rank.forEach((rank, i) => {
        const node = job.node[i], nth = at.get(node) || 0;
        at.set(node, nth + 1);
        const left = (node % s.columns) * s.wide, top = Math.floor(node / s.columns) * s.high;
        if (nth === 0 && s.label) {
          pen.fillStyle = pk.colour("soft");
          pen.fillText(job.nodes[node], left, top, s.wide - 6);
        }
        const x = left + (nth % s.across) * (s.cell + s.gap);
        const y = top + s.label + Math.floor(nth / s.across) * (s.cell + s.gap);
        const state = told.states[job.state[i]], value = job.slowdown[i];
        pen.fillStyle = STATES[state] ? pk.colour(STATES[state])
          : value === null ? pk.colour("calm-fill") : mixed(value, colours);
        pen.beginPath();
        pen.roundRect(x, y, s.cell, s.cell, s.cell >= 10 ? 3 : 1);
        pen.fill();
        if (job.cordoned[i]) {
          pen.strokeStyle = pk.colour("held");
          pen.lineWidth = s.cell >= 10 ? 2 : 1;
          pen.strokeRect(x + .5, y + .5, s.cell - 1, s.cell - 1);
        }
        if (s.cell >= 20) {
          pen.fillStyle = state === "dead" ? "#fff" : "rgba(0,0,0,.62)";
          pen.textAlign = "center";
          pen.fillText(String(rank), x + s.cell / 2, y + s.cell / 2 - 5, s.cell - 2);
          pen.textAlign = "left";
        }
        cells.push([x, y, i]);
      });
      const find = (event) => {
        const edge = canvas.getBoundingClientRect();
        const x = event.clientX - edge.left, y = event.clientY - edge.top;
        const hit = cells.find(([a, b]) => x >= a && x < a + s.cell + s.gap && y >= b && y < b + s.cell + s.gap);
        return hit ? hit[2] : -1;
      };
      canvas.onmousemove = (event) => {
        const i = find(event);
        if (i < 0) { pk.tip("", event); return; }
        const value = job.slowdown[i];
        pk.tip(`rank ${job.rank[i]} on ${job.nodes[job.node[i]]}\n${told.states[job.state[i]]}` +
          (job.cordoned[i] ? ", cordoned" : "") + ", " +
          (value === null ? "measuring" : `\u00d7${value.toFixed(2)}, suspicion ${job.suspicion[i].toFixed(2)}`), event);
      };
      canvas.onmouseleave = (event) => pk.tip("", event);
      canvas.onclick = (event) => {
        const i = find(event);
        if (i >= 0) location.href = `/jobs/${job.name}#rank-${job.rank[i]}`;
      };
    });
    while (maps.children.length > told.jobs.length) maps.lastChild.remove();
    maps.dataset.drawn = String(told.jobs.reduce((sum, job) => sum + job.rank.length, 0));
  };

  pk.follow(place.dataset.url, 2000, (answer) => { told = answer; draw(); });
  addEventListener("resize", () => told && draw());
});
