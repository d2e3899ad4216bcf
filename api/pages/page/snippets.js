// A request as a command and as a program. Both read the API key from the environment, where the server asks for one.

const OPENAI = new Set(["messages", "model", "temperature", "top_p", "max_tokens", "seed", "stop", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format"]);

export function curl(base, body, needsKey) {
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $PENSTOCK_API_KEY"` : "";
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${base}/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${data}'`;
}

export function python(base, body, needsKey) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  if (Object.keys(extra).length) own.push(["extra_body", extra]);
  const fields = own.map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`).join("");
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${needsKey ? 'os.environ["PENSTOCK_API_KEY"]' : '"none"'})

answer = client.chat.completions.create(
${fields})
print(answer.choices[0].message)`;
}

function literal(value, indent) {
  const deeper = `${indent}    `;
  const lines = (open, items, close) =>
    items.length ? `${open}\n${items.map((item) => `${deeper}${item},\n`).join("")}${indent}${close}` : open + close;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return lines("[", value.map((item) => literal(item, deeper)), "]");
  if (typeof value !== "object") return JSON.stringify(value);
  return lines("{", Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, deeper)}`), "}");
}
