"""A LlamaIndex query engine over this library's own documents, answered by an ensemble.

pip install "safe-llm-ensemble[llama-index]" wordllama
python examples/llama_index_query_engine.py "When does the consensus check keep a drafted token?"
"""

import sys
from pathlib import Path
from typing import Any

import wordllama
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter
from wordllama import WordLlama

from llama_index.llms.safe_llm import EnsembleEventHandler, SafeLLM

DOCS = Path(__file__).parent.parent / "docs"
FILES = ("concepts.md", "models.md", "performance.md", "python.md")
WORDS = WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)  # its weights are in the wheel


class WordLlamaEmbedding(BaseEmbedding):
    """Static word vectors: small, and good enough to find a paragraph."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return list(map(float, WORDS.embed([text], norm=True)[0]))

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def main(question: str, llm: SafeLLM | None = None) -> EnsembleEventHandler:
    """Answer `question`, then show where the ensemble acted and what took how long."""
    llm = llm or SafeLLM(preset="demo", max_tokens=80)
    Settings.tokenizer = llm.tokenize  # chunks and prompts are measured in a member's own tokens
    documents = [Document(text=(DOCS / file).read_text(), metadata={"file": file}) for file in FILES]
    index = VectorStoreIndex.from_documents(
        documents, embed_model=WordLlamaEmbedding(), transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)]
    )
    engine: Any = index.as_query_engine(llm=llm, streaming=True, similarity_top_k=2)
    with EnsembleEventHandler().listening() as totals:
        response = engine.query(question)
        for text in response.response_gen:
            print(text, end="", flush=True)
    print(f"\n\nfrom {', '.join(sorted({node.metadata['file'] for node in response.source_nodes}))}\n")
    for point in totals.points:
        drafted, chosen = (repr(point[key]) if point[key] else "the end" for key in ("token_before", "token"))
        print(f"token {point['position']}: {f'{drafted} became {chosen}' if point['replaced'] else chosen}")
    print(f"\n{totals.summary()}")
    return totals


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "When does the consensus check keep a drafted token?")
