"""A question to a model, with OpenAI's own SDK: answered whole, then in pieces; then two texts compared.

pip install openai
headwaiter serve --config examples/demo.toml
python -m examples.chat_openai --url http://localhost:8080/v1
"""

from __future__ import annotations

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a model of a running service.")
    parser.add_argument("--url", default="http://localhost:8080/v1")
    parser.add_argument("--key", default="none", help="one of http.api_keys; anything where there are none")
    parser.add_argument("--chat", default="smollm2", help="a model for text generation")
    parser.add_argument("--embed", default="minilm", help="a model for embeddings")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    options = parser.parse_args()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": options.question}]

    with OpenAI(base_url=options.url, api_key=options.key) as client:
        print("models:", ", ".join(model.id for model in client.models.list()))

        whole = client.chat.completions.create(model=options.chat, messages=messages, max_tokens=40)
        print("whole: ", whole.choices[0].message.content)

        print("pieces: ", end="")
        for chunk in client.chat.completions.create(
            model=options.chat, messages=messages, max_tokens=40, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                print(choice.delta.content or "", end="|", flush=True)
            if chunk.usage is not None:
                print(f"\ntokens: {chunk.usage.prompt_tokens} read, {chunk.usage.completion_tokens} written")

        vectors = client.embeddings.create(model=options.embed, input=["a day at the sea", "an hour on the beach"])
        one, other = (entry.embedding for entry in vectors.data)
        print(f"alike:  {sum(a * b for a, b in zip(one, other, strict=True)):.2f}")


if __name__ == "__main__":
    main()
