"""Streams several answers at once in one event loop: `python examples/async_llm.py`."""

import argparse
import asyncio

from penstock import AsyncLLM, RequestOutputKind, SamplingParams


async def stream(llm: AsyncLLM, prompt: str, max_tokens: int) -> None:
    """Prints what is new as it comes."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params):
        for piece in output.outputs:
            print(f"{prompt!r} + {piece.text!r}")


async def first_words(llm: AsyncLLM, prompt: str, count: int) -> str:
    """Leaves once there is enough: that ends the request, and frees what it held."""
    async for output in llm.generate(prompt, SamplingParams(temperature=0)):
        text = output.outputs[0].text
        if len(text.split()) > count:
            return " ".join(text.split()[:count])
    return text


async def run(model: str | None, max_tokens: int) -> None:
    async with AsyncLLM(model) as llm:
        await asyncio.gather(stream(llm, "The sun is", max_tokens), stream(llm, "The moon is", max_tokens))
        print(f"the first words: {await first_words(llm, 'Once upon a time', 4)!r}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Stream several answers at once.")
    parser.add_argument("--model", help="a Hugging Face id, a directory or a .gguf file (default: a small one, fetched once)")
    parser.add_argument("--max-tokens", type=int, default=8)
    arguments = parser.parse_args(argv)
    asyncio.run(run(arguments.model, arguments.max_tokens))


if __name__ == "__main__":
    main()
