// The settings as fields of a request, the schema's verdict, and the request as code.
import { call, hasKey } from "./client.js";
import { curl, python } from "./snippets.js";
import { $, copyText, element, verdict } from "./text.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "thinking_token_budget"];
const PATIENCE = 400; // milliseconds after the last key
const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city now",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, is_capital: { type: "boolean" } },
  required: ["city", "is_capital"],
};

// What a setting cannot be sent with. `field` is its element.
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function parsed(id, what) {
  const text = $(id).value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError($(id), `${what}: ${error.message}`);
  }
}

function tools() {
  const list = parsed("tools", "The tool definitions are not JSON");
  if (list !== null && !Array.isArray(list)) throw new SettingError($("tools"), "The tool definitions are not a JSON array");
  return list ?? [];
}

const responseFormat = (schema) => ({
  type: "json_schema",
  json_schema: { name: "answer", schema, ...($("strict").checked ? { strict: true } : {}) },
});

// The fields of a request that the panel decides. Throws `SettingError`.
export function settings() {
  const fields = {};
  for (const name of NUMBERS) {
    if (!$(name).checkValidity()) throw new SettingError($(name), `${$(name).labels[0].textContent}: ${$(name).validationMessage}`);
    if ($(name).value !== "") fields[name] = Number($(name).value);
  }
  const stop = $("stop-strings").value.split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if ($("logprobs").checked) Object.assign(fields, { logprobs: true, top_logprobs: Number($("top_logprobs").value) });
  const list = tools();
  if (list.length) {
    fields.tools = list;
    const choice = $("tool-choice");
    const isName = choice.selectedOptions[0]?.dataset.name !== undefined;
    if (choice.value !== "auto") fields.tool_choice = isName ? { type: "function", function: { name: choice.value } } : choice.value;
  }
  if ($("constrain").checked) {
    const schema = parsed("schema", "The schema is not JSON");
    if (schema === null) throw new SettingError($("schema"), "There is no schema to constrain answers to");
    fields.response_format = responseFormat(schema);
  }
  return fields;
}

function showTools() {
  let list = [];
  try {
    list = tools();
    $("tools-error").textContent = "";
  } catch (error) {
    $("tools-error").textContent = error.message;
  }
  $("tools-state").textContent = list.length || "";
  const choice = $("tool-choice");
  const chosen = choice.value;
  for (const option of choice.querySelectorAll("[data-name]")) option.remove();
  for (const name of list.map((tool) => tool?.function?.name).filter((name) => typeof name === "string")) {
    const option = element("option", { value: name }, `only ${name}`);
    option.dataset.name = name;
    choice.append(option);
  }
  choice.value = chosen;
  if (!choice.value) choice.value = "auto";
}

const showVerdict = (...lines) => $("verdict").replaceChildren(...lines);
// Paths begin with the field of the request that the schema is sent in; here they begin at the schema.
const short = (path) => path?.replaceAll(/response_format\.json_schema\.schema(?=\W|$)/g, "$");
const VERDICTS = {
  exact: () => [verdict("exact", "Exact: every keyword is enforced")],
  lenient: ({ not_enforced: rest }) => ["Lenient: answers are checked, since this is not enforced", ...rest].map((line) => verdict("lenient", short(line))),
  refused: ({ refusal: { message, path } }) => [verdict("refused", `Refused: ${message}`, short(path))],
};

let checking = null;
let checkTimer = 0;

async function check() {
  checking?.abort();
  const { signal } = (checking = new AbortController());
  let schema;
  try {
    schema = parsed("schema", "Not JSON");
  } catch (error) {
    return showVerdict(verdict("refused", error.message));
  }
  if (schema === null) return showVerdict();
  try {
    const response = await call("v1/grammar/check", { body: { response_format: responseFormat(schema) }, signal });
    const found = await response.json();
    if (!signal.aborted) showVerdict(...VERDICTS[found.verdict](found));
  } catch (error) {
    if (error.name !== "AbortError") showVerdict(verdict("refused", `Not checked: ${error.message}`, short(error.path)));
  }
}

function checkSoon() {
  clearTimeout(checkTimer);
  checkTimer = setTimeout(check, PATIENCE);
}

// Shows the request that `body()` gives. With an error there is none.
function showSnippet(body) {
  if (!$("request").open) return;
  const base = new URL("v1", location.href).href;
  try {
    const write = $("language").value === "curl" ? curl : python;
    $("snippet").textContent = write(base, body(), hasKey());
    $("copy").disabled = false;
  } catch (error) {
    $("snippet").textContent = error.message;
    $("copy").disabled = true;
  }
}

async function copySnippet() {
  $("copy").textContent = await copyText($("snippet").textContent, $("snippet"));
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
}

function insert(id, value) {
  $(id).value = JSON.stringify(value, null, 2);
  $(id).dispatchEvent(new Event("input", { bubbles: true }));
}

// `body` gives the request as it would be sent now. Returns what shows it again.
export function openPanel(body) {
  const refresh = () => showSnippet(body);
  $("panel").addEventListener("input", refresh);
  $("request").addEventListener("toggle", refresh);
  $("copy").addEventListener("click", copySnippet);
  $("tools").addEventListener("input", showTools);
  $("tools-example").addEventListener("click", () => insert("tools", TOOLS));
  $("schema").addEventListener("input", checkSoon);
  $("strict").addEventListener("input", checkSoon);
  $("constrain").addEventListener("input", () => ($("schema-state").textContent = $("constrain").checked ? "on" : ""));
  $("schema-example").addEventListener("click", () => {
    insert("schema", SCHEMA);
    if (!$("constrain").checked) $("constrain").click();
  });
  return refresh;
}
