// What a model wrote, as elements. It is only ever appended as text nodes, so that nothing in it is read as markup.

export const $ = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// A message, its kind one of exact, lenient and refused, and the path of what it is about.
export function verdict(kind, message, path) {
  return element("p", { className: `verdict ${kind}` }, message, ...(path ? [" at ", element("code", {}, path)] : []));
}

// Copies, or marks what is to be copied where a page may not: over plain HTTP from another machine. Says which.
export async function copyText(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {
    getSelection().selectAllChildren(shown);
    return "Marked";
  }
}

const MAX_FENCE = 100; // characters of a line that may begin or end a block of code
const OPENING = /^ {0,3}(`{3,}|~{3,})[^`]*$/;
const PARTIAL = /^ {0,3}(`{0,2}|~{0,2}|`{3,}[^`]*|~{3,}.*)$/;

// Streamed text: paragraphs, and blocks of code between fences. A line that may be a fence is held until it is known.
export class TextView {
  constructor(parent) {
    this.parent = parent;
    this.held = "";
    this.fence = null;
    this.node = null;
    this.isLineStart = true;
  }

  append(text) {
    text = this.held + text;
    this.held = "";
    while (text) {
      const end = text.indexOf("\n") + 1;
      const line = end ? text.slice(0, end - 1) : text;
      if (this.isLineStart && line.length <= MAX_FENCE) {
        if (!end && PARTIAL.test(line)) {
          this.held = line;
          return;
        }
        if (end && this.takeFence(line)) {
          text = text.slice(end);
          continue;
        }
      }
      this.write(end ? text.slice(0, end) : text);
      this.isLineStart = end > 0;
      text = end ? text.slice(end) : "";
    }
  }

  end() {
    if (this.held && !(this.fence && this.takeFence(this.held))) this.write(this.held);
    this.held = "";
  }

  // Whether the line is a fence, or a blank line between paragraphs.
  takeFence(line) {
    if (this.fence) {
      if (!line.trim().startsWith(this.fence) || line.trim().replaceAll(this.fence[0], "")) return false;
      this.fence = this.node = null;
      return true;
    }
    const opening = OPENING.exec(line);
    if (opening) {
      this.fence = opening[1];
      this.node = document.createTextNode("");
      this.parent.append(element("pre", { className: "code", tabIndex: 0 }, this.node));
    } else if (line.trim()) {
      return false;
    } else {
      this.node = null;
    }
    return true;
  }

  write(text) {
    if (!this.node) {
      this.node = document.createTextNode("");
      this.parent.append(element("p", {}, this.node));
    }
    this.node.appendData(text);
  }
}

const info = $("token-info");
const logprobs = new WeakMap();
const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100%" : share < 0.01 ? "<0.01%" : `${share.toFixed(share < 10 ? 2 : 1)}%`;
};
const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

// Tokens, the less probable the more strongly marked. One of them at a time is a stop of the tab key; arrows go to the others.
export class TokenView {
  constructor(parent) {
    this.list = element("p", { className: "tokens" });
    this.list.setAttribute("role", "group");
    this.list.setAttribute("aria-label", "Tokens with their probabilities; arrow keys move among them");
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    parent.append(this.list);
    this.list.addEventListener("pointerover", ({ target }) => showInfo(target));
    this.list.addEventListener("focusin", ({ target }) => showInfo(target));
    this.list.addEventListener("pointerleave", hideInfo);
    this.list.addEventListener("focusout", hideInfo);
    this.list.addEventListener("keydown", (event) => this.move(event));
  }

  append(tokens) {
    for (const token of tokens) {
      const text = (token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token).replaceAll("\n", "↵\n");
      const span = element("span", {}, text);
      span.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
      if (!this.list.firstChild) span.tabIndex = 0;
      logprobs.set(span, token);
      this.list.append(span);
    }
  }

  move(event) {
    const step = { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[event.key];
    const next = step && event.target[step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

function showInfo(target) {
  const token = logprobs.get(target);
  if (!token) return hideInfo();
  const rows = token.top_logprobs.map((other) => row(other, other.token === token.token));
  if (!token.top_logprobs.some((other) => other.token === token.token)) rows.unshift(row(token, true));
  info.replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
  info.hidden = false;
  target.setAttribute("aria-describedby", info.id);
  const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const below = box.bottom + info.offsetHeight + 12 < innerHeight;
  info.style.left = `${Math.max(8, Math.min(box.left, innerWidth - info.offsetWidth - 8))}px`;
  info.style.top = `${below ? box.bottom + 6 : box.top - info.offsetHeight - 6}px`;
}

function row({ token, logprob }, isChosen) {
  const bar = element("td", { className: "share" }, element("i"));
  bar.firstChild.style.width = `${100 * Math.exp(logprob)}%`;
  const cells = [element("th", { scope: "row" }, visible(token)), bar, element("td", {}, percent(logprob))];
  return element("tr", { className: isChosen ? "chosen" : "" }, ...cells);
}

export function hideInfo() {
  info.hidden = true;
}
