// One colour per node, the same wherever it appears. From its name, so that it is the same tomorrow; two nodes that would
// share one get different ones as long as there are enough. The hues differ in brightness too, for eyes that do not
// tell them apart, and wherever there is room the name stands beside the colour.

const COLOURS = 8;
const given = new Map();
const used = new Array(COLOURS).fill(0);

function hash(text) {
  let value = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 0x01000193);
  return (value ^ (value >>> 15)) >>> 0;
}

export function colourOf(node) {
  if (!given.has(node)) {
    const wanted = hash(node) % COLOURS;
    const fewest = Math.min(...used);
    let colour = wanted;
    while (used[colour] > fewest) colour = (colour + 1) % COLOURS;
    used[colour]++;
    given.set(node, colour);
  }
  return given.get(node);
}

// The nodes of a table that the server has filled.
export function colourRows(table) {
  const nodes = [...table.querySelectorAll(".node")];
  colourAll(new Set(nodes.map((node) => node.textContent)));
  for (const node of nodes) node.classList.add(`n${colourOf(node.textContent)}`);
}

// In the order of their names, so that the same nodes get the same colours in whichever order they appear.
export function colourAll(nodes) {
  [...nodes].sort().forEach(colourOf);
}
