// The conversation: its messages as elements, and as the messages of a request.
import { TextView, TokenView, element, verdict } from "./text.js";

const NAMES = { user: "You", assistant: "Model" };
const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(milliseconds < 9950 ? 1 : 0)} s`;

// One message. A call's result belongs to the call.
export class Entry {
  constructor(role, text, actions) {
    this.role = role;
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.content = element("div", { className: "content" });
    this.body = element("div", { className: "body" }, this.content);
    const buttons = actions.map(([label, act]) => element("button", { type: "button", className: "quiet", onclick: () => act(this) }, label));
    this.actions = element("div", { className: "actions" }, ...buttons);
    this.element = element("li", { className: `entry ${role}` }, element("h2", { className: "role" }, NAMES[role]), this.body, this.actions);
    if (text) this.show(text);
  }

  show(text) {
    this.text = text;
    this.content.replaceChildren();
    this.view = new TextView(this.content);
    this.view.append(text);
    this.view.end();
  }

  // A text area in place of the text; `done` is called when it is closed.
  edit(done) {
    const field = element("textarea", { className: "editor", value: this.text });
    field.setAttribute("aria-label", "Text of the message");
    const close = (isKept) => {
      if (isKept) this.show(field.value);
      form.replaceWith(this.content);
      this.element.classList.remove("editing");
      this.actions.querySelector("button").focus();
      done();
    };
    const cancel = element("button", { type: "button", onclick: () => close(false) }, "Cancel");
    const form = element("form", {}, field, element("div", { className: "row" }, element("button", { className: "primary" }, "Save"), cancel));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close(true);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel.click();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.element.classList.add("editing");
    this.content.replaceWith(form);
    field.focus();
  }

  // As a request has it: the message, and the results of its calls.
  get messages() {
    if (!this.text && !this.calls.length) return []; // an answer that failed
    const message = { role: this.role, content: this.text };
    if (!this.calls.length) return [message];
    message.tool_calls = this.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return [message, ...this.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value }))];
  }
}

// A message while the model writes it. What comes is gathered, and shown once for each frame.
export class Answer extends Entry {
  constructor(actions, { onFrame, sendResults, isJson }) {
    super("assistant", "", actions);
    this.onFrame = onFrame;
    this.sendResults = sendResults;
    this.started = performance.now();
    this.pending = [];
    this.stats = element("p", { className: "stats" }, "Waiting…");
    this.body.append(this.stats);
    this.element.setAttribute("aria-busy", "true");
    if (isJson) this.content.classList.add("code");
    this.view = new TextView(this.content);
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices) {
      const { content, reasoning_content: reasoning = choice.delta.reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) {
        this.last = performance.now();
        this.first ??= this.last;
      }
      if (choice.finish_reason) this.reason = choice.finish_reason;
      if (choice.structured_output) this.conformance = choice.structured_output;
      this.pending.push({ content, reasoning, calls, logprobs: choice.logprobs });
    }
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = null;
    const waiting = this.pending;
    this.pending = [];
    const joined = (name) => waiting.map((part) => part[name] ?? "").join("");
    const tokens = (name) => waiting.flatMap((part) => part.logprobs?.[name] ?? []);
    this.drawReasoning(joined("reasoning"), tokens("reasoning_content"));
    this.drawText(joined("content"), tokens("content"));
    for (const delta of waiting.flatMap((part) => part.calls ?? [])) this.drawCall(delta);
    this.drawStats();
    this.onFrame();
  }

  drawReasoning(text, tokens) {
    if (text && !this.fold) {
      this.reasoningStarted = this.last;
      this.foldTitle = element("summary");
      this.reasoningBody = element("div", { className: "reasoning" });
      this.reasoningView = new TextView(this.reasoningBody);
      this.fold = element("details", { className: "fold" }, this.foldTitle, this.reasoningBody);
      this.body.prepend(this.fold);
    }
    this.reasoning += text;
    if (tokens.length && this.fold) {
      if (!this.reasoningTokens) this.reasoningBody.replaceChildren();
      this.reasoningTokens ??= new TokenView(this.reasoningBody);
      this.reasoningTokens.append(tokens);
    } else if (text && !this.reasoningTokens) {
      this.reasoningView.append(text);
    }
    if (text) this.reasoningEnded = this.last;
    if (this.fold) {
      const time = seconds(this.reasoningEnded - this.reasoningStarted);
      this.foldTitle.textContent = this.text || this.calls.length || this.isDone ? `Thought for ${time}` : `Thinking… ${time}`;
    }
  }

  drawText(text, tokens) {
    this.text += text;
    if (tokens.length) {
      this.tokens ??= new TokenView(this.content);
      this.tokens.append(tokens);
    } else if (text && !this.tokens) {
      this.view.append(text);
    }
  }

  drawCall({ index, id, function: { name, arguments: text } }) {
    if (!this.calls[index]) {
      const written = document.createTextNode("");
      const result = element("textarea", { rows: 1, placeholder: "What the tool answered" });
      const label = element("label", {}, "Result", result);
      const title = element("h3", {}, "Call of ", element("code", {}, name));
      this.calls[index] = { id, name, text: "", written, result };
      if (!this.callList) {
        this.callList = element("div", { className: "calls" });
        this.content.after(this.callList);
      }
      this.callList.append(element("section", { className: "call" }, title, element("pre", { className: "code", tabIndex: 0 }, written), label));
    }
    this.calls[index].text += text ?? "";
    this.calls[index].written.appendData(text ?? "");
  }

  drawStats() {
    const parts = [];
    if (this.first) parts.push(`${Math.round(this.first - this.started)} ms to first token`);
    const count = this.usage?.completion_tokens;
    if (count > 1 && this.last > this.first) parts.push(`${(((count - 1) * 1000) / (this.last - this.first)).toFixed(0)} tokens/s`);
    if (count) parts.push(`${count} tokens`);
    if (this.isDone) {
      const { prompt_tokens: prompt, prompt_tokens_details: details } = this.usage ?? {};
      if (prompt) parts.push(`${prompt} prompt tokens${details?.cached_tokens ? `, ${details.cached_tokens} cached` : ""}`);
      if (this.reason && this.reason !== "stop") parts.push(this.reason === "length" ? "cut at its length" : this.reason.replaceAll("_", " "));
    }
    this.stats.textContent = parts.join(" · ") || "Waiting…";
  }

  // `isEnforced`: an exact grammar held the answer to its schema.
  end(error, isEnforced) {
    this.isDone = true;
    if (error?.name === "AbortError") this.reason = "stopped";
    cancelAnimationFrame(this.frame);
    this.draw();
    this.view.end();
    this.reasoningView?.end();
    this.element.removeAttribute("aria-busy");
    if (!this.first && !error) this.stats.textContent = "An empty answer";
    if (error && this.reason !== "stopped") this.showError(error);
    else if (this.conformance) this.showConformance(this.conformance);
    else if (isEnforced && this.reason === "stop") this.note("exact", "Conforms: the whole schema was enforced");
    if (this.calls.length) {
      const send = element("button", { type: "button", className: "primary", onclick: () => this.sendResults(this) }, "Send results");
      this.callList.append(send);
    }
    this.onFrame();
  }

  showConformance({ valid, error, path }) {
    if (valid) this.note("exact", "Conforms to the schema");
    else this.note(valid === null ? "lenient" : "refused", `${valid === null ? "Not checked" : "Does not conform"}: ${error}`, path);
  }

  note(...about) {
    const note = verdict(...about);
    this.stats.before(note);
    return note;
  }

  showError({ message, path }) {
    this.note("refused", message, path).setAttribute("role", "alert");
    if (!this.first) this.stats.textContent = "No answer";
  }
}
