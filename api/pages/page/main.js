// The page: its model, its conversation, and what the keys and buttons do.
import { call, chunks, hasKey, keepKey, onKeyNeeded } from "./client.js";
import { Answer, Entry } from "./conversation.js";
import { pollGauges } from "./gauges.js";
import { SettingError, openPanel, settings } from "./panel.js";
import { openPooling } from "./pooling.js";
import { $, copyText, hideInfo } from "./text.js";

const entries = [];
let running = null; // what aborts the answer that is being written

const USER_ACTIONS = [["Edit", edit], ["Answer again", (entry) => answerAfter(entry)], ["Delete", remove]];
const ANSWER_ACTIONS = [["Edit", edit], ["Regenerate", (entry) => answerAfter(entries[entries.indexOf(entry) - 1])], ["Copy", copy], ["Delete", remove]];

// The request for an answer to these messages. Throws `SettingError`.
function request(messages) {
  const system = $("system-prompt").value.trim();
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  return { model: $("model").value, messages: all, ...settings() };
}

function requestNow() {
  const draft = $("draft").value.trim();
  const before = draft || !isAnswered() ? entries : entries.slice(0, -1); // else the request for the last answer
  const messages = before.flatMap((entry) => entry.messages);
  if (draft || !messages.length) messages.push({ role: "user", content: draft || "Hello" });
  return request(messages);
}
const isAnswered = () => entries.at(-1)?.role === "assistant";
const refreshPanel = openPanel(requestNow);

// The end stays in view while it is being written, unless the reader has scrolled away from it.
let follows = true;
const scroller = $("scroll");
scroller.addEventListener("scroll", () => {
  follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  hideInfo();
});
function follow() {
  if (follows) scroller.scrollTop = scroller.scrollHeight;
}

function add(entry) {
  entries.push(entry);
  $("entries").append(entry.element);
  changed();
  follow();
}

function changed() {
  hideInfo();
  $("welcome").hidden = entries.length > 0;
  refreshPanel();
}

function remove(entry) {
  entries.splice(entries.indexOf(entry), 1);
  entry.element.remove();
  $("draft").focus();
  changed();
}

function edit(entry) {
  entry.edit(changed);
}

async function copy(entry) {
  $("status").textContent = await copyText(entry.text, entry.content);
}

// Drops what follows `entry`, or everything without one, and lets the model write the next message.
function answerAfter(entry) {
  for (const dropped of entries.splice(entries.indexOf(entry) + 1)) dropped.element.remove();
  return answer();
}

function setRunning(controller) {
  running = controller;
  document.body.classList.toggle("running", controller !== null);
  const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  if (hadFocus) (controller ? $("stop") : $("draft")).focus();
  $("status").textContent = controller ? "The model answers" : "The answer has ended";
}

async function answer() {
  if (running) return;
  const body = checked(() => request(entries.flatMap((entry) => entry.messages)));
  if (!body) return;
  const isConstrained = body.response_format !== undefined;
  const entry = new Answer(ANSWER_ACTIONS, { onFrame: follow, sendResults: answerAfter, isJson: isConstrained });
  follows = true;
  add(entry);
  setRunning(new AbortController());
  let failure, isEnforced;
  try {
    const streamed = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await call("v1/chat/completions", { body: streamed, signal: running.signal });
    isEnforced = isConstrained && !response.headers.has("x-structured-output-warning");
    for await (const chunk of chunks(response)) entry.take(chunk);
  } catch (error) {
    failure = error;
  }
  entry.end(failure, isEnforced);
  setRunning(null);
  changed();
}

function checked(make) {
  try {
    return make();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    point(error);
  }
}

// Shows the setting that the request cannot be sent with.
function point({ field, message }) {
  showPanel(true);
  field.closest("details").open = true;
  field.focus();
  $("status").textContent = message;
  field.setCustomValidity(message);
  field.reportValidity();
  field.addEventListener("input", () => field.setCustomValidity(""), { once: true });
}

async function send() {
  const text = $("draft").value.trim();
  if (running || (!text && (!entries.length || isAnswered())) || !checked(settings)) return;
  if (text) {
    add(new Entry("user", text, USER_ACTIONS));
    $("draft").value = "";
  }
  await answer();
}

const stop = () => running?.abort();

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => {
  stop();
  for (const entry of entries.splice(0)) entry.element.remove();
  $("draft").focus();
  changed();
});
for (const id of ["draft", "system-prompt", "model"]) $(id).addEventListener("input", refreshPanel);
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("chat").hidden && !$("key-dialog").open) {
    event.preventDefault();
    send();
  } else if (event.key === "Escape") {
    hideInfo();
    if (running) stop();
    else if (document.body.classList.contains("panel-open")) showPanel(false);
  }
});

function showPanel(isOpen) {
  document.body.classList.toggle("panel-open", isOpen);
  $("open-panel").setAttribute("aria-expanded", String(isOpen));
}
$("open-panel").addEventListener("click", () => {
  showPanel(!document.body.classList.contains("panel-open"));
  if (document.body.classList.contains("panel-open")) $("close-panel").focus();
});
$("close-panel").addEventListener("click", () => {
  showPanel(false);
  $("open-panel").focus();
});

onKeyNeeded((message) => {
  const dialog = $("key-dialog");
  $("key-message").textContent = hasKey() ? (message ?? "") : "This server asks for an API key.";
  $("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const close = (isEntered) => {
      dialog.onclose = null;
      dialog.close();
      resolve(isEntered);
    };
    dialog.onclose = () => close(false);
    $("key-cancel").onclick = () => close(false);
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      const key = $("key").value.trim();
      if (!/^[!-~]+$/.test(key)) return;
      keepKey(key);
      $("key").value = "";
      close(true);
      pollGauges();
    };
  });
});

// What the model of a card can do; before its first load, that may be unknown.
function show(card) {
  const pools = card.tasks[0] && !card.tasks.includes("generate");
  document.title = `${card.id} – Penstock`;
  $("chat").hidden = $("panel").hidden = pools;
  $("pooling").hidden = !pools;
  if (pools) return openPooling(card);
  if (matchMedia("(hover)").matches) $("draft").focus(); // elsewhere it would open a keyboard
  refreshPanel();
}

async function start() {
  pollGauges();
  const select = $("model");
  try {
    const { data } = await (await call("v1/models")).json();
    select.replaceChildren(...data.map(({ id }) => new Option(id)));
    select.disabled = false;
    show(data[0]);
    select.onchange = () => show(data[select.selectedIndex]);
  } catch (error) {
    select.replaceChildren(new Option("No model"));
    $("chat").hidden = false;
    $("welcome").textContent = `No models: ${error.message}. Reload to try again.`;
  }
}
start();
