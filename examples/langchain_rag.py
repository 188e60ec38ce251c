"""Retrieval-augmented generation over this project's own documents, offline: BM25 finds, the ensemble answers.

python examples/langchain_rag.py
"""

from pathlib import Path
from typing import Any

import bm25s
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from langchain_safe_llm import ChatSafeLLM

DOCS = Path(__file__).parent.parent / "docs"

PROMPT = ChatPromptTemplate.from_template("Answer in one sentence, from this text only:\n\n{context}\n\n{question}")


class BM25Retriever(BaseRetriever):
    """The paragraphs that share the rarest words with the question."""

    paragraphs: list[Document]
    index: Any

    @classmethod
    def of(cls, folder: Path) -> "BM25Retriever":
        """Index the Markdown files of a folder, paragraph by paragraph."""
        paragraphs, heading = [], ""
        for path in sorted(folder.glob("*.md")):
            for text in path.read_text(encoding="utf-8").split("\n\n"):
                heading = text.strip() if text.startswith("#") else heading
                if len(text) > 80:  # found by its heading too: prose seldom repeats the name of its subject
                    paragraphs.append(Document(f"{heading}\n{text.strip()}", metadata={"source": path.name}))
        index = bm25s.BM25()
        index.index(bm25s.tokenize([p.page_content for p in paragraphs], show_progress=False), show_progress=False)
        return cls(paragraphs=paragraphs, index=index)

    def _get_relevant_documents(self, query: str) -> list[Document]:
        found, _ = self.index.retrieve(bm25s.tokenize(query, show_progress=False), k=3, show_progress=False)
        return [self.paragraphs[i] for i in found[0]]


def main(model: BaseChatModel | None = None, question: str = "What does prefix mass compute?") -> str:
    """Answer a question about this project and return the answer."""
    model = model or ChatSafeLLM(preset="demo", max_tokens=96)
    context = BM25Retriever.of(DOCS) | (lambda found: "\n\n".join(d.page_content for d in found))
    chain = {"context": context, "question": RunnablePassthrough()} | PROMPT | model | StrOutputParser()
    answer = str(chain.invoke(question))
    print(answer)
    return answer


if __name__ == "__main__":
    main()
