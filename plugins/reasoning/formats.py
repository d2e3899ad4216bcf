"""Every reasoning format that comes with the server: a row for each family, and the few that are code."""

from dataclasses import replace

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import FormatInfo, Turn
from penstock.plugins.harmony import ANALYSIS, CHANNEL, ENDS, FINAL, MESSAGE, ROLE, Harmony
from penstock.plugins.reasoning.think_format import ALL, AppendThink, ThinkFormat, Thinking

OPEN_LINE = "<think>\n"  # how many templates end the prompt
ON_LINES = "Capitals.\n</think>\n\nOslo."  # and how their models go on
QWEN_TURNS = ("<|im_start|>", "<|im_end|>")

DEEPSEEK_R1 = ThinkFormat(
    models="DeepSeek-R1 and its distillations, GLM-Z1, Step-5",
    thinking=Thinking.ALWAYS,
    aliases=("deepseek-r1", "step5"),
    signs=("split('</think>')[-1]", "<｜Assistant｜>"),
    prompt_tail=OPEN_LINE,
    example=ON_LINES,
    note="What follows the marker is kept unchanged.",
)
GLM45 = ThinkFormat(
    models="GLM-4.5, GLM-4.6",
    switches=("enable_thinking", "thinking"),  # models that always think open the reasoning in their prompts, whatever the request says
    implicit_ends=("<tool_call>",),
    drops_repeated_end=True,
    signs=("<think>", "</think>", "<|assistant|>", "<tool_call>", "<arg_key>"),
    example="<think>Capitals.</think>\nOslo.",
)
QWEN3 = ThinkFormat(
    models="Qwen3, Qwen3.5, Qwen3-Thinking, QwQ, MiniCPM-V",
    switches=("enable_thinking",),
    boundaries=QWEN_TURNS,
    implicit_ends=("<tool_call>", *QWEN_TURNS),
    drops_repeated_end=True,  # the model repeats it at times
    aliases=("qwen3-thinking", "qwen3_thinking", "minicpmv"),
    signs=("<think>", "</think>", "<|im_start|>", "<tool_call>"),
    counter_signs=("<｜Assistant｜>",),  # a distillation of DeepSeek-R1 has the vocabulary
    prompt_tail=OPEN_LINE,
    example=ON_LINES,
)

THINK_TAGS = {
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3": ThinkFormat(
        models="DeepSeek-V3.1, DeepSeek-V3.2",
        thinking=Thinking.OFF,
        switches=("thinking", "enable_thinking"),
        aliases=("deepseek-v3", "deepseek_v31", "deepseek-v31", "deepseek_v32", "deepseek-v32"),
        signs=("<think>", "</think>", "<｜Assistant｜>", "thinking"),
        prompt_tail="<think>",
        note="Where it is off, all is content, markers too.",
    ),
    "deepseek_v4": ThinkFormat(
        models="DeepSeek-V4, DeepSeek-V4.1",
        switches=("thinking", "enable_thinking"),
        off_efforts=("none",),
        # V4's, V4.1's, and at times V3.2's
        implicit_ends=("<｜DSML｜tool_calls>", "<｜DSML｜ calls>", "<｜DSML｜function_calls>"),
        drops_repeated_end=True,
        aliases=("deepseek-v4", "deepseek_v41", "deepseek-v41"),
        signs=("<think>", "</think>", "<｜Assistant｜>", "thinking", "｜DSML｜", "tool_calls>"),
        prompt_tail="<think>",
    ),
    "ernie45": ThinkFormat(
        models="ERNIE-4.5-Thinking",
        thinking=Thinking.ALWAYS,
        newlines_after_end=ALL,
        content_tags=("<response>", "</response>"),
        signs=("<think>", "<response>", "<global_setting>", "think_mode=True"),
        prompt_tail=OPEN_LINE,
        example="Capitals.\n</think>\n\n<response>\nOslo.\n</response>\n",
    ),
    "glm45": GLM45,
    "glm47": replace(
        GLM45,
        models="GLM-4.7, GLM-5, Ling 3",
        aliases=("ling3",),
        signs=("<think>", "</think>", "<role>ASSISTANT</role>"),
        prompt_tail="<think>",
        example="",
        note="The same parser as `glm45`; these models' prompts open the reasoning.",
    ),
    # In 3.2 sentences of ordinary text announce reasoning and response, in 3.3 both are in tags.
    "granite": ThinkFormat(
        models="Granite 3.2",
        start="Here is my thought process:",
        end="Here is my response:",
        other_starts=("Here's my thought process:",),
        other_ends=("Here's my response:",),
        switches=("thinking",),
        signs=("Here is my thought process", "Here is my response"),
        example="Here is my thought process: Capitals.\nHere is my response: Oslo.",
        note="Its template requests reasoning only if `thinking` is true. The markers are ordinary text.",
    ),
    "granite_33": ThinkFormat(
        models="Granite 3.3",
        switches=("thinking",),
        newlines_after_end=ALL,
        content_tags=("<response>", "</response>"),
        aliases=("granite3.3", "granite-3.3"),
        signs=("<think>", "</think>", "<response>", "<|start_of_role|>"),
        example="<think>Capitals.</think>\n<response>Oslo.</response>",
        note="Its template requests reasoning only if `thinking` is true.",
    ),
    "granite_thinking": ThinkFormat(
        models="Granite 4.2",
        implicit_ends=("<tool_call>",),
        drops_repeated_end=True,
        newlines_after_end=ALL,
        nonempty_content=True,
        aliases=("granite-thinking", "granite_thinking_parser"),
        signs=("<think>", "</think>", "<|start_of_role|>"),
        counter_signs=("<response>",),  # Granite 3.3 writes another format
        prompt_tail=OPEN_LINE,
        example="Capitals.\n</think>\nOslo.",
        note="As `nemotron_v3`, but for the line breaks.",
    ),
    "holo2": ThinkFormat(
        models="Holo2, and models that are not listed but mark their reasoning so",
        switches=("thinking", "enable_thinking"),
        signs=("<think>", "</think>"),
        prompt_tail=OPEN_LINE,
        example=ON_LINES,
    ),
    "hunyuan_a13b": ThinkFormat(
        models="Hunyuan-A13B",
        newlines_after_start=1,
        newlines_before_end=1,
        newlines_after_end=1,
        content_tags=("<answer>", "</answer>"),
        aliases=("hunyuan-a13b", "hunyuan"),
        signs=("<think>", "</think>", "<answer>", "</answer>"),
        example="<think>\nCapitals.\n</think>\n<answer>\nOslo.\n</answer>",
    ),
    "hy_v3": ThinkFormat(
        models="Hunyuan 3, Hunyuan 4",
        has_suffix=True,
        aliases=("hy-v3", "hy_v4", "hy-v4"),
        signs=("think_begin_token", "reasoning_effort", "no_think"),
        prompt_tail="<think>",
        note="`reasoning_effort` switches it: not with `no_think`.",
    ),
    "interns1": ThinkFormat(
        models="Intern-S1",
        switches=("enable_thinking",),
        inner_call=("<|action_start|>", "<|action_end|>"),
        drops_repeated_end=True,
        aliases=("intern-s1", "intern_s1"),
        signs=("<think>", "</think>", "<|action_start|>"),
        prompt_tail="<think>",
    ),
    "k2_horizon": ThinkFormat(
        models="K2-Horizon",
        start="<ifm|think>",
        end="</ifm|think>",
        effort_markers=(
            ("high", ("<ifm|think>", "</ifm|think>")),
            ("medium", ("<ifm|think_fast>", "</ifm|think_fast>")),
            ("low", ("<ifm|think_faster>", "</ifm|think_faster>")),
        ),
        implicit_ends=("<ifm|tool_calls>",),
        drops_repeated_end=True,
        aliases=("k2-horizon",),
        signs=("<ifm|think>", "</ifm|think>"),
        prompt_tail="<ifm|think>",
    ),
    "kimi": ThinkFormat(models="Kimi-VL-Thinking", start="◁think▷", end="◁/think▷", signs=("◁think▷", "◁/think▷")),
    "kimi_k2": ThinkFormat(
        models="Kimi-K2-Thinking, Kimi-K2.5",
        switches=("thinking", "enable_thinking"),
        implicit_ends=("<|tool_calls_section_begin|>",),
        drops_repeated_end=True,
        aliases=("kimi-k2", "kimi_k25", "kimi-k25"),
        signs=("<think>", "</think>", "<|im_middle|>", "<|tool_calls_section_begin|>"),
        prompt_tail="<think>",
    ),
    "mimo": replace(QWEN3, models="MiMo", aliases=(), signs=(), counter_signs=(), note="As `qwen3`."),
    "minimax_m2": ThinkFormat(
        models="MiniMax-M2",
        thinking=Thinking.ALWAYS,
        implicit_ends=("<minimax:tool_call>",),
        drops_repeated_end=True,  # the model repeats it at times
        aliases=("minimax-m2", "minimax"),
        signs=("<think>", "</think>", "]~b]ai", "<minimax:tool_call>"),
        prompt_tail=OPEN_LINE,
        example=ON_LINES,
    ),
    "minimax_m3": ThinkFormat(
        models="MiniMax-M3",
        start="<mm:think>",
        end="</mm:think>",
        drops_leading_end=True,  # earlier turns without reasoning begin with one in the prompt
        aliases=("minimax-m3",),
        signs=("<mm:think>", "</mm:think>"),
        note="Switched by `thinking_mode`: `enabled`, `disabled` or `adaptive`, the default.",
    ),
    "nemotron_v3": ThinkFormat(
        models="Nemotron 3",
        implicit_ends=("<tool_call>",),
        drops_repeated_end=True,
        nonempty_content=True,
        aliases=("nemotron-v3", "nemotron_3", "nemotron-3"),
        signs=("<think>", "</think>", "<|im_start|>", "<tool_call>", "truncate_history_thinking"),
        prompt_tail=OPEN_LINE,
        example="Capitals.\n</think>\nOslo.",
        note="On unless `enable_thinking` is false.",
    ),
    "olmo3": ThinkFormat(
        models="OLMo 3 Think",
        aliases=("olmo-3",),
        signs=("<|im_start|>", "<think>", "<functions>"),
        prompt_tail="<think>",
        note="The markers are ordinary text, each of several tokens.",
    ),
    "plamo3": ThinkFormat(
        models="PLaMo 3",
        start="<|plamo:begin_think:plamo|>",  # each marker is several tokens
        end="<|plamo:end_think:plamo|>",
        switches=("enable_thinking",),
        implicit_ends=("<|plamo:begin_tool_requests:plamo|>",),
        drops_repeated_end=True,
        signs=("<|plamo:begin_", "begin_think"),
        prompt_tail="<|plamo:begin_think:plamo|>",
    ),
    "poolside_v1": ThinkFormat(
        models="Laguna",
        thinking=Thinking.OFF,
        switches=("thinking", "enable_thinking"),
        boundaries=("<assistant>",),
        implicit_ends=("<tool_call>",),
        drops_leading_end=True,  # as the prompt does with thinking off
        drops_repeated_end=True,
        signs=("<think>", "</think>", "<tool_call>", "<assistant>", "</assistant>", "<arg_key>"),
        prompt_tail="<think>",
    ),
    "qwen3": QWEN3,
    "seed_oss": ThinkFormat(
        models="Seed-OSS",
        start="<seed:think>",
        end="</seed:think>",
        boundaries=("<seed:bos>", "<seed:eos>"),
        implicit_ends=("<seed:tool_call>",),
        drops_repeated_end=True,
        aliases=("seed-oss",),
        signs=("<seed:think>", "</seed:think>"),
        prompt_tail="<seed:think>",
        example="<seed:think>Capitals.</seed:think>Oslo.",
        note="The model may write the marker that the prompt has written; with a budget of 0 the prompt closes the reasoning.",
    ),
    "step3": replace(
        DEEPSEEK_R1,
        models="Step-3",
        aliases=(),
        signs=("<think>", "</think>", "<｜tool_calls_begin｜>", "<steptml:invoke"),
    ),
    "step3p5": ThinkFormat(
        models="Step-3.5, Step-3.7",
        thinking=Thinking.ALWAYS,
        implicit_ends=("<tool_call>",),
        drops_repeated_end=True,
        newlines_before_end=1,
        newlines_after_end=1,
        signs=("<think>", "</think>", "<|im_start|>", "<tool_call>", "<|im_start|>tool_response"),
        prompt_tail=OPEN_LINE,
        example="Capitals.\n</think>\nOslo.",
    ),
}

KIMI_K3_START = "<|open|>think<|sep|>"  # each tag is three tokens

# Formats in which reasoning, content and calls are blocks, channels or messages of their own.
MESSAGES = {
    "apertus": ThinkFormat(
        models="Apertus",
        start="<|inner_prefix|>",
        end="<|inner_suffix|>",
        boundaries=("<|assistant_start|>", "<|assistant_end|>"),
        inner_call=("<|tools_prefix|>", "<|tools_suffix|>"),
        has_blocks_anywhere=True,
        aliases=("apertus2509",),
        signs=("<|inner_prefix|>", "<|inner_suffix|>"),
        prompt_tail="<|assistant_start|>",
    ),
    "apriel": ThinkFormat(
        models="Apriel 1.5, Apriel 1.6",
        start="Here are my reasoning steps:",
        end="[BEGIN FINAL RESPONSE]",
        thinking=Thinking.ALWAYS,
        boundaries=("<|assistant|>", "<|begin_assistant|>"),
        implicit_ends=("<tool_calls>",),
        has_blocks_anywhere=True,
        wrappers=("[END FINAL RESPONSE]", "\n[END FINAL RESPONSE]"),
        trims_space=True,
        signs=("[BEGIN FINAL RESPONSE]",),
        prompt_tail="Here are my reasoning steps:\n",
        example="Capitals.\n[BEGIN FINAL RESPONSE]\nOslo.\n[END FINAL RESPONSE]",
    ),
    "cohere_command": ThinkFormat(
        models="Command R7B, Command A and its reasoning, translation and vision models, North",
        start="<|START_THINKING|>",
        end="<|END_THINKING|>",
        boundaries=("<|CHATBOT_TOKEN|>",),
        implicit_ends=("<|START_ACTION|>",),
        has_blocks_anywhere=True,
        wrappers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        trims_space=True,
        aliases=("cohere-command", "cohere_command3", "cohere_command4"),
        signs=("<|START_THINKING|>", "<|END_THINKING|>"),
        prompt_tail="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
        example="Capitals.<|END_THINKING|><|START_TEXT|>Oslo.<|END_TEXT|>",
    ),
    "gemma4": ThinkFormat(
        models="Gemma 4",
        start="<|channel>",
        end="<channel|>",
        label="thought",
        boundaries=("<turn|>", "<|turn>"),
        implicit_ends=("<|tool_call>",),
        has_blocks_anywhere=True,
        aliases=("gemma-4",),
        signs=("<|channel>", "<channel|>"),
        prompt_tail="<|turn>model\n",
        note="Off unless `enable_thinking`: the template then writes an empty block.",
    ),
    "inkling": ThinkFormat(
        models="Inkling",
        start="<|content_thinking|>",
        end="<|end_message|>",
        other_starts=("<|message_model|><|content_thinking|>",),
        boundaries=("<|message_model|>",),
        implicit_ends=("<|content_invoke_tool_json|>",),
        has_blocks_anywhere=True,
        content_starts=("<|content_text|>",),
        wrappers=("<|message_model|><|content_text|>", "<|content_model_end_sampling|>"),
        signs=("<|content_thinking|>", "<|content_text|>"),
        prompt_tail="<|message_model|>",
        markers=("<|content_thinking|>", "<|end_message|>", "<|message_model|>", "<|content_text|>", "<|content_model_end_sampling|>"),
        example="<|content_thinking|>Capitals.<|end_message|><|message_model|><|content_text|>Oslo.<|end_message|>",
    ),
    "kimi_k3": ThinkFormat(
        models="Kimi-K3",
        start=KIMI_K3_START,
        end="<|close|>think<|sep|>",
        implicit_ends=("<|open|>tools<|sep|>",),
        has_blocks_anywhere=True,
        content_starts=("<|open|>response<|sep|>",),
        wrappers=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
        aliases=("kimi-k3",),
        signs=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        prompt_tail=KIMI_K3_START,
        markers=(KIMI_K3_START, "<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        example="Capitals.<|close|>think<|sep|><|open|>response<|sep|>Oslo.<|close|>response<|sep|><|close|>message<|sep|>",
        note="On unless `thinking` is false.",
    ),
    "mistral": ThinkFormat(
        models="Magistral, Ministral 3, Mistral Medium 3.5",
        start="[THINK]",
        end="[/THINK]",
        text_markers=("<think>", "</think>"),  # what checkpoints with the older tokenizer write
        boundaries=("[/INST]",),
        has_blocks_anywhere=True,
        aliases=("magistral",),
        signs=("[THINK]", "[/THINK]"),
        note="Switched by the system prompt or `reasoning_effort`. Calls within the reasoning are not made.",
    ),
    "muse_glimmer": ThinkFormat(
        models="Muse Glimmer, Muse Spark",
        start="to=self<|message|>",
        end="<|eom|>",
        other_starts=("<|start|>assistant to=self<|message|>",),
        boundaries=("<|start|>assistant",),
        has_blocks_anywhere=True,
        wrappers=(
            *("to=user<|message|>", "<|start|>assistant to=user<|message|>"),
            *("to=commentary<|message|>", "<|start|>assistant to=commentary<|message|>"),
            *("to={tool}<|message|>", "<|start|>assistant to={tool}<|message|>"),
            *("to={tool}.{tool}<|message|>", "<|start|>assistant to={tool}.{tool}<|message|>"),  # without a namespace, it is its own
            *("<|start|>assistant<|message|>", "<|eot|>"),
        ),
        trims_space=True,
        aliases=("muse", "muse-glimmer"),
        signs=("to=self", "<|message|>", "<|eom|>"),
        prompt_tail="<|start|>assistant",
        markers=("to=self<|message|>", "<|eom|>", "<|start|>assistant", "to=user<|message|>", "<|message|>", "<|eot|>"),
        example=" to=self<|message|>Capitals.<|eom|><|start|>assistant to=user<|message|>Oslo.<|eot|>",
        note="Headers of messages to the user, to `commentary` and to offered tools are such markers; other headers stay.",
    ),
    "solar_open": ThinkFormat(
        models="Solar Open",
        start="<|think|>",
        end="<|end|>",
        other_starts=("<|begin|>assistant<|think|>",),
        boundaries=("<|begin|>assistant",),
        has_blocks_anywhere=True,
        wrappers=("<|begin|>assistant", "<|begin|>assistant<|content|>", "<|content|>"),
        aliases=("solar-open",),
        signs=("<|think|>", "<|content|>", "<|begin|>assistant"),
        prompt_tail="<|begin|>assistant",
        example="<|think|>Capitals.<|end|><|begin|>assistant<|content|>Oslo.<|end|>",
        note="Off where `reasoning_effort` is `low` or `minimal`.",
    ),
}

FORMATS = {**THINK_TAGS, **MESSAGES}

GPT_OSS = FormatInfo(
    models="gpt-oss",
    markers=(ANALYSIS, *ENDS, ROLE, FINAL),
    quirks=(
        "there may be several blocks; the final message and commentary without recipient are content, calls are left to the tool parser, "
        "and what goes to other recipients is reasoning; always on"
    ),
    aliases=("openai-gptoss", "gpt_oss", "gpt-oss", "gptoss"),
    signs=(CHANNEL, MESSAGE, "analysis"),
    prompt_tail=ROLE,
    example=f"{ANALYSIS}why<|end|>{ROLE}{FINAL}because",
)
APPEND_THINK = FormatInfo(
    models="MiniMax-M2",
    markers=("<think>", "</think>"),
    quirks="Nothing is reasoning: the content is `<think>` and the whole answer. Constraints hold from the first token.",
    aliases=("minimax-m2-append-think", "minimax_append_think", "minimax-append-think"),
    prompt_tail=OPEN_LINE,
    example=ON_LINES,
)


def openai_gptoss(turn: Turn) -> Harmony:
    """Reasons from the start, unless the prompt has opened another message."""
    return Harmony(turn, reads_calls=False)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    for name, row in FORMATS.items():
        register(name, row)
    register("minimax_m2_append_think", AppendThink, APPEND_THINK)
    register("openai_gptoss", openai_gptoss, GPT_OSS)
