// The draft tree: accepted path and the target's own token on a straight line, refused branches above and below it.
const LONGEST = 18; // characters of a node's label
const HEIGHT = 32, PAD = 10, EDGE = 10, GAP = 30, WIDEST_GAP = 72;
const WRAPPED_ROWS = 4; // with no more rows than these a long draft is wrapped like text; a wider tree scrolls
const CROWDED_ROWS = 12; // with more than these, rows stand close and captions are left out
const SMALLEST = 0.72; // scale down to which a tree is shrunk; then the stage scrolls
const CAPTION = { correction: "target", bonus: "bonus", plain: "target", root: "last token" };
const BLANKS = { " ": "·", "\n": "↵", "\t": "⇥", "\x7f": "␡" };

function visible(label) {
  const sign = (character) => BLANKS[character] ?? String.fromCharCode(0x2400 + character.charCodeAt(0));
  const letters = [...label.replace(/[\x00-\x20\x7f]/g, sign)];
  return letters.length > LONGEST ? letters.slice(0, LONGEST - 1).join("") + "…" : letters.join("");
}

const ownToken = (step) => (step.count > step.path.length ? tokens[step.first + step.count - 1] : null);
const ownNode = (own, parent) => ({ label: own.label, parent, confidence: null, state: own.origin, children: [] });

function treeOf(step) {
  const kept = new Set(step.path), own = ownToken(step), last = step.path.at(-1) ?? -1;
  const nodes = step.nodes.map((node, i) => ({ ...node, state: kept.has(i) ? "accepted" : "refused", children: [] }));
  const line = step.path.map((i) => nodes[i]);
  if (own) line.push(nodes[nodes.push(ownNode(own, last)) - 1]);
  const before = step.first ? tokens[step.first - 1].label : record.root;
  const root = { label: before, confidence: null, state: "root", children: [], depth: 0 };
  for (const node of nodes) {
    node.above = nodes[node.parent] ?? root;
    node.depth = node.above.depth + 1;
    node.above.children.push(node);
  }
  return { all: [root, ...nodes], line: [root, ...line] };
}

function arrange(line) {
  const taken = { 1: [], "-1": [] }; // rows in use on either side of the line, by column
  for (const node of line) node.row = 0;
  // Deepest first: branches that leave the line earlier then pass outside of those that leave it later.
  for (const node of [...line].reverse())
    for (const child of node.children) if (child.row === undefined) hang(child, taken);
}

function hang(branch, taken) {
  const columns = [];
  for (let depth = branch.depth - 1; depth <= deepest(branch); depth++) columns.push(depth);
  const rows = (side) => Math.max(...columns.map((column) => taken[side][column] ?? 0));
  const side = rows(1) <= rows(-1) ? 1 : -1;
  const total = rows(side) + stack(branch, rows(side) + 1, side);
  for (const column of columns) taken[side][column] = total;
}

const deepest = (node) => Math.max(node.depth, ...node.children.map(deepest));

function stack(node, row, side) {
  node.row = side * row;
  let used = 0;
  for (const child of node.children) used += stack(child, row + used, side);
  return Math.max(used, 1);
}

const span = (numbers) => Math.max(...numbers) - Math.min(...numbers);

function locate(all, room) {
  const rows = span(all.map((node) => node.row)) + 1, widths = [];
  for (const node of all) widths[node.depth] = Math.max(widths[node.depth] ?? 0, (node.width = widthOf(node)));
  const slack = (room - 2 * EDGE - widths.reduce((sum, width) => sum + width)) / (widths.length - 1);
  const wrap = rows <= WRAPPED_ROWS, gap = wrap ? GAP : Math.max(GAP, Math.min(WIDEST_GAP, slack));
  let x = EDGE, band = 0;
  const places = widths.map((width, depth) => {
    if (wrap && depth && x + width + EDGE > room) [x, band] = [EDGE + GAP, band + 1];
    const place = { x, band, gap, late: depth / widths.length };
    x += width + gap;
    return place;
  });
  for (const node of all) Object.assign(node, places[node.depth]);
  return [Math.max(...all.map((node) => node.x + node.width)) + EDGE, stackBands(all, band + 1, rows)];
}

function stackBands(all, bands, rows) {
  const pitch = HEIGHT + (rows > CROWDED_ROWS ? 5 : rows > WRAPPED_ROWS ? 16 : 24);
  let top = EDGE;
  for (let band = 0; band < bands; band++) {
    const members = all.filter((node) => node.band === band), own = members.map((node) => node.row);
    for (const node of members) node.y = top + (node.row - Math.min(...own)) * pitch;
    top += span(own) * pitch + HEIGHT + (rows > 1 ? 36 : 22);
  }
  for (const node of all) if (rows <= CROWDED_ROWS || node.state === "root") node.caption = CAPTION[node.state];
  return top;
}

function widthOf(node) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `15px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  return Math.max(pen.measureText(visible(node.label)).width + 2 * PAD, HEIGHT);
}

function link(node) {
  const from = node.above, y = node.y + HEIGHT / 2, x = from.x + from.width, fromY = from.y + HEIGHT / 2;
  const bend = Math.min(node.gap, node.x - x) / 2, stub = GAP * 0.7;
  const path = from.band !== node.band
    ? `M${x} ${fromY}h${stub}M${node.x - stub} ${y}H${node.x}`
    : `M${x} ${fromY}H${node.x - 2 * bend}c${bend} 0 ${bend} ${y - fromY} ${2 * bend} ${y - fromY}`;
  return shape("path", { class: `link ${node.state}`, d: path, style: `--late:${node.late}` });
}

function pill(node) {
  const place = { transform: `translate(${node.x} ${node.y})`, style: `--late:${node.late}` };
  const box = shape("rect", { class: "box", width: node.width, height: HEIGHT, rx: 8 });
  const title = shape("title", {}, tip(node));
  const group = shape("g", { class: `node ${node.state}`, ...place }, title, box, lettering(node));
  if (node.confidence !== null) group.append(...gauge(node));
  if (node.caption) group.append(shape("text", { class: "caption", x: 2, y: HEIGHT + 14 }, node.caption));
  return group;
}

function lettering(node) {
  const parts = visible(node.label).split(/([·↵⇥]+)/);
  const spans = parts.map((part, i) => shape("tspan", i % 2 ? { class: "blank" } : {}, part));
  return shape("text", { x: PAD, y: HEIGHT / 2, "dominant-baseline": "central" }, ...spans);
}

function gauge(node) {
  const full = node.width - 2 * PAD, bar = { x: PAD, y: HEIGHT - 5, height: 2.5 };
  const sure = shape("rect", { ...bar, width: full * node.confidence, class: "sure" });
  return [shape("rect", { ...bar, width: full, class: "track" }), sure];
}

function tip(node) {
  const what = { root: "the last token before this step", refused: "drafted, refused", ...MEANING }[node.state];
  const sure = node.confidence === null ? "" : `, confidence ${node.confidence.toFixed(2)}`;
  return `${JSON.stringify(node.label)}: ${what}${sure}`;
}

function drawTree(step) {
  const { all, line } = treeOf(step), stage = byId("stage"), refused = (node) => node.state === "refused";
  arrange(line);
  let [width, height] = locate(all, stage.clientWidth);
  if (height > stage.clientHeight) [width, height] = locate(all, stage.clientWidth / SMALLEST);
  const scale = Math.max(SMALLEST, Math.min(1, stage.clientHeight / height, stage.clientWidth / width));
  const size = { viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale };
  const links = all.slice(1).sort((a, b) => refused(b) - refused(a)).map(link); // the accepted path lies on top
  stage.replaceChildren(shape("svg", { ...size, role: "img" }, ...links, ...all.map(pill)));
  const end = line.at(-1), x = (end.x + end.width) * scale, y = (end.y + HEIGHT) * scale;
  stage.scrollTo(x - stage.clientWidth * 0.7, y - stage.clientHeight / 2);
}
