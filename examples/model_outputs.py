"""What the model computes on its way to the next token: `python examples/model_outputs.py`.

How sure it was of each token it said, from its logits; and how alike it finds texts, from the hidden states of their tokens.
"""

import argparse

import torch
from torch.nn.functional import cosine_similarity

from penstock import LLM, SamplingParams, TextPrompt

TEXTS = ["The cat sat on the mat.", "A kitten lay on the rug.", "Interest rates rose again in March."]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Look into the model.")
    parser.add_argument("texts", nargs="*", default=TEXTS)
    parser.add_argument("--model", help="a Hugging Face id, a directory or a .gguf file (default: a small one, fetched once)")
    arguments = parser.parse_args(argv)

    with LLM(arguments.model) as llm:
        tokenizer = llm.get_tokenizer()
        params = SamplingParams(temperature=0, max_tokens=6, additional_outputs=["logits"])
        [output] = llm.generate("The capital of France is", params, use_tqdm=False)
        answer = output.outputs[0]
        for token_id, logits in zip(answer.token_ids, answer.additional_outputs["logits"], strict=True):
            probabilities = logits.softmax(-1)
            entropy = -(probabilities * probabilities.clamp_min(1e-30).log2()).sum()
            print(f"{tokenizer.decode([token_id])!r}: probability {probabilities[token_id]:.3f}, entropy {entropy:.1f} bits")

        # Of the prompts. Their first tokens may be in the prefix cache and would be absent: a salt of one's own.
        wanted = SamplingParams(max_tokens=1, additional_outputs=["hidden_states.last"], additional_context_outputs=True)
        prompts: list[TextPrompt] = [{"prompt": text, "cache_salt": text} for text in arguments.texts]
        states = [output.prompt_outputs["hidden_states.last"] for output in llm.generate(prompts, wanted, use_tqdm=False)]
        means = torch.stack([rows_TH.float().mean(0) for rows_TH in states])
        means -= means.mean(0)
        for number, text in enumerate(arguments.texts):
            alike = cosine_similarity(means[number : number + 1], means).tolist()
            print(f"{text!r} ({len(states[number])} tokens): {', '.join(f'{value:+.2f}' for value in alike)}")


if __name__ == "__main__":
    main()
