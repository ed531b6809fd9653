// A layout: stages and tensor groups as rows of boxes; experts by their replica ranks, layer by layer.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("layout"), stages = document.getElementById("stages");
  const slider = document.getElementById("layer"), at = document.getElementById("layer-at");
  const wanted = document.getElementById("generation"), experts = document.getElementById("experts");
  let told = null;

  const element = (kind, name, text) => {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const drawStages = () => {
    const { layout, ranks } = told, most = Math.max(...layout.pipelines.map(([batch]) => batch));
    const rows = new Map();  // the groups of all pipelines that run the same layers
    for (const [batch, pipeline] of layout.pipelines)
      pipeline.forEach(([first, end, group, attention, mlp], number) => {
        const name = `stage ${number}: layers ${first} to ${end - 1}`;
        if (!rows.has(name)) rows.set(name, { number, first, groups: [] });
        rows.get(name).groups.push({ group, attention, mlp: mlp || attention, batch });
      });
    const inOrder = [...rows].sort(([, a], [, b]) => a.number - b.number || a.first - b.first);
    stages.replaceChildren(...inOrder.map(([name, stage]) => {
      const row = element("div", "stage"), groups = element("div", "groups");
      const widest = Math.max(...stage.groups.map(({ group }) => group.length));
      groups.style.gridTemplateColumns = `repeat(auto-fill, minmax(min(100%, ${66 * widest}px), 1fr))`;
      row.append(element("div", "name", name), groups);
      for (const { group, attention, mlp, batch } of stage.groups) {
        const box = element("div", "group");
        group.forEach((rank, i) => {
          const cell = element("div", "rank"), bar = element("i"), known = ranks[rank] || {};
          const count = attention[i] === mlp[i] ? `${attention[i]} shards` : `${attention[i]} + ${mlp[i]} shards`;
          cell.style.flex = `${Math.max(attention[i], 1)} 1 0`;
          cell.append(element("b", "", String(rank)), ` ${(100 * batch).toFixed(1)} %`);
          if (layout.num_attention_shards > 1) cell.append(element("div", "small", count));
          bar.style.width = `${100 * batch / most}%`;
          cell.append(bar);
          if (known.slowdown >= 1.1) cell.classList.add("slow");
          cell.onmousemove = (event) => pk.tip(`rank ${rank} on ${known.node || "?"}\n${count}, ` +
            `${(100 * batch).toFixed(2)} % of the batch` + (known.slowdown ? `\n\u00d7${known.slowdown.toFixed(2)}` : ""), event);
          cell.onmouseleave = (event) => pk.tip("", event);
          box.append(cell);
        });
        groups.append(box);
      }
      return row;
    }));
    if (layout.standing_by) stages.append(element("p", "", `stand by: ranks ${layout.standing_by.join(", ")}`));
    if (layout.speeds) stages.append(element("p", "small", "taken as slower: " +
      layout.speeds.map(([rank, speed]) => `rank ${rank} at ${(100 * speed).toFixed(0)} %`).join(", ")));
  };

  const drawExperts = () => {
    const layer = Number(slider.value), hosts = told.layout.experts[layer] || [];
    at.textContent = String(layer);
    if (!hosts.length) { experts.replaceChildren(element("p", "none", "A dense layer: it has no experts.")); return; }
    const ranks = [...new Set(hosts.flat().map(([rank]) => rank))].sort((a, b) => a - b);
    const row = new Map(ranks.map((rank, i) => [rank, i]));
    const canvas = element("canvas", "map");
    experts.replaceChildren(canvas);
    const left = 92, top = 18, width = experts.clientWidth - left - 8;
    const cw = Math.max(2, Math.min(34, width / hosts.length)), ch = Math.max(4, Math.min(22, 620 / ranks.length));
    const pen = pk.canvas(canvas, top + ch * ranks.length + 4), fill = pk.colour("accent");
    const sums = new Map(ranks.map((rank) => [rank, 0]));
    hosts.forEach((on) => on.forEach(([rank, share]) => sums.set(rank, sums.get(rank) + share)));
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = pk.colour("soft");
    pen.textBaseline = "middle";
    ranks.forEach((rank, i) => { if (ch >= 11 || i % Math.ceil(12 / ch) === 0)
      pen.fillText(`rank ${rank}  ${(100 * sums.get(rank) / hosts.length).toFixed(1)} %`, 0, top + ch * (i + .5), left - 6); });
    hosts.forEach((on, expert) => {
      if (cw >= 16 || expert % Math.ceil(24 / cw) === 0) {
        pen.globalAlpha = 1;
        pen.fillStyle = pk.colour("soft");
        pen.fillText(String(expert), left + cw * expert + cw / 2 - 4, 8);
      }
      for (let i = 0; i < ranks.length; i++) {
        pen.globalAlpha = 1;
        pen.fillStyle = pk.colour("page");
        pen.fillRect(left + cw * expert, top + ch * i, cw - 1, ch - 1);
      }
      for (const [rank, share] of on) {
        pen.globalAlpha = .25 + .75 * share;
        pen.fillStyle = fill;
        pen.fillRect(left + cw * expert, top + ch * row.get(rank), cw - 1, ch - 1);
      }
    });
    canvas.onmousemove = (event) => {
      const edge = canvas.getBoundingClientRect();
      const expert = Math.floor((event.clientX - edge.left - left) / cw), i = Math.floor((event.clientY - edge.top - top) / ch);
      const host = (hosts[expert] || []).find(([rank]) => row.get(rank) === i);
      pk.tip(host ? `layer ${layer} expert ${expert} on rank ${host[0]}: ${(100 * host[1]).toFixed(1)} % of its tokens` : "", event);
    };
    canvas.onmouseleave = (event) => pk.tip("", event);
    experts.dataset.drawn = String(hosts.length);
  };

  const show = (generation) => pk.follow(place.dataset.url + (generation ? `?generation=${generation}` : ""), 0, (answer) => {
    told = answer;
    document.getElementById("reason").textContent = `Generation ${told.layout.generation}: ${told.reason}`;
    wanted.value = told.layout.generation;
    slider.max = String(told.layout.experts.length - 1);
    drawStages();
    drawExperts();
  });
  slider.oninput = drawExperts;
  wanted.onchange = () => show(wanted.value);
  addEventListener("resize", () => told && drawExperts());
  show("");
});
