// What is offered for models that turn texts into numbers: similarities, scores, classes.
import { call } from "./client.js";
import { $, element, verdict } from "./text.js";

const number = (value) => value.toFixed(3);

async function post(path, body) {
  return (await (await call(path, { body })).json()).data;
}

function table(head, rows) {
  const heading = element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)));
  return element("div", { className: "table" }, element("table", {}, element("thead", {}, heading), element("tbody", {}, ...rows)));
}

function row(name, cells) {
  return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
}

// A cell whose colour is as strong as its value, from 0 to 1.
function shaded(value) {
  const cell = element("td", { className: "shaded" }, number(value));
  cell.style.setProperty("--share", Math.max(0, Math.min(1, value)).toFixed(3));
  return cell;
}

const length = (vector) => Math.hypot(...vector);
const cosine = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0) / (length(a) * length(b) || 1);

async function embed(model, texts) {
  const vectors = (await post("v1/embeddings", { model, input: texts })).map((item) => item.embedding);
  const similar = vectors.map((a, index) => row(`${index + 1}. ${texts[index]}`, vectors.map((b) => shaded(cosine(a, b)))));
  const title = element("h3", {}, `Cosine similarity of vectors of ${vectors[0].length} numbers`);
  return [title, table(["", ...texts.map((_, index) => `${index + 1}`)], similar)];
}

async function score(model, texts) {
  const scores = await post("v1/score", { model, text_1: $("query").value, text_2: texts });
  const rows = scores.map((item, index) => [item.score, row(texts[index], [shaded(item.score)])]).sort((a, b) => b[0] - a[0]);
  return [table(["Text", "Score"], rows.map(([, made]) => made))];
}

async function classify(model, texts) {
  const classes = await post("classify", { model, input: texts });
  return [table(["Text", "Class", "Probability"], classes.map((item, index) => row(texts[index], [element("td", {}, item.label ?? "–"), shaded(Math.max(...item.probs))])))];
}

const KINDS = {
  embed: { title: "An embedding model", text: "Similar texts have similar vectors.", button: "Compare", run: embed },
  classify: { title: "A classifier", text: "It gives each text a class.", button: "Classify", run: classify },
  score: { title: "A cross-encoder", text: "It scores how well texts answer a query.", button: "Score", run: score },
};
const SAMPLE = "A man is eating.\nSomeone has lunch.\nThe train leaves at nine.";

// Shows what `model`, a card of /v1/models, can do.
export function openPooling({ id, tasks }) {
  const kind = KINDS[["score", "classify", "embed"].find((task) => tasks.includes(task))];
  const [what, path] = tasks.includes("transcription") ? ["A model of speech", "/v1/audio/transcriptions"] : ["A pooling model", "/pooling"];
  $("pooling-title").textContent = kind?.title ?? what;
  $("pooling-text").textContent = kind?.text ?? `${id} serves ${tasks.join(", ")} at ${path}, which this page has no form for.`;
  const form = $("pooling-form");
  form.hidden = !kind;
  if (!kind) return;
  const button = form.querySelector("button");
  button.textContent = kind.button;
  $("query-field").hidden = kind.run !== score;
  if (kind.run !== score) $("texts").value ||= SAMPLE;
  form.onsubmit = async (event) => {
    event.preventDefault();
    const texts = $("texts").value.split("\n").filter((line) => line.trim());
    if (!texts.length) return $("texts").focus();
    button.disabled = true;
    try {
      $("pooling-result").replaceChildren(...(await kind.run(id, texts)));
    } catch (error) {
      $("pooling-result").replaceChildren(verdict("refused", error.message, error.path));
    } finally {
      button.disabled = false;
    }
  };
}
