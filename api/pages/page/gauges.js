// The server's load, read from /metrics while the page can be seen. Hidden where that is not allowed.
import { call } from "./client.js";
import { $ } from "./text.js";

const INTERVAL = 2000;
const list = $("gauges");
let timer = 0;

// Sums over all labels, by the metric's name.
function sums(text) {
  const totals = new Map();
  for (const [, name, value] of text.matchAll(/^penstock:(\w+)(?:\{.*\})? (\S+)/gm)) totals.set(name, (totals.get(name) ?? 0) + Number(value));
  return (name) => totals.get(name);
}

const share = (part, whole) => part === undefined ? part : whole ? `${Math.round((100 * part) / whole)}%` : "–";

function show(metric) {
  const texts = {
    running: metric("num_requests_running"),
    waiting: metric("num_requests_waiting"),
    cache: share(metric("kv_cache_usage_perc"), 1),
    hits: share(metric("prefix_cache_hits_total"), metric("prefix_cache_queries_total")),
    accepted: share(metric("spec_decode_num_accepted_tokens_total"), metric("spec_decode_num_draft_tokens_total")),
  };
  for (const [name, text] of Object.entries(texts)) {
    const value = list.querySelector(`[data-gauge=${name}]`);
    value.textContent = text;
    value.parentNode.hidden = text === undefined; // a pooling model has no such metric
  }
  list.hidden = false;
}

export async function pollGauges() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const response = await call("metrics", { quiet: true });
    show(sums(await response.text()));
  } catch (error) {
    list.hidden = true;
    if (error.status) return; // it may not be read: a key that is entered starts this again
  }
  timer = setTimeout(pollGauges, INTERVAL);
}

document.addEventListener("visibilitychange", pollGauges);
