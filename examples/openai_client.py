"""OpenAI's own client on an ensemble: a stream, a schema, and what the ensemble did.

In one shell:  safe-llm serve --preset demo
In another:    python examples/openai_client.py

Needs `pip install "safe-llm-ensemble[server]" openai`; any server that `safe-llm serve` runs will do.
"""

from __future__ import annotations

import openai
from pydantic import BaseModel

QUESTION = "What is the capital of France? Answer in one sentence."


class Place(BaseModel):
    """What the second question asks for."""

    city: str
    country: str


def main(client: openai.OpenAI | None = None) -> str:
    """Ask twice and return the first answer."""
    client = client or openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    asked = [{"role": "user", "content": QUESTION}]

    text = ""
    for chunk in client.chat.completions.create(model=model, messages=asked, stream=True, max_tokens=48):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            print(choice.delta.content or "", end="", flush=True)
        for record in getattr(chunk, "safe_llm", None) or ():  # on the last chunk
            print(f"\n{record['n_points']} ensemble points in {record['n_tokens']} tokens, members {record['members']}")

    asked = [{"role": "user", "content": "Where is the Eiffel Tower? Answer in JSON."}]
    answer = client.chat.completions.parse(model=model, messages=asked, response_format=Place, max_tokens=48)
    print(answer.choices[0].message.parsed)
    return text


if __name__ == "__main__":
    main()
