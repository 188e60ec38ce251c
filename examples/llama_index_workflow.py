"""A LlamaIndex workflow that asks an ensemble eight questions at once; they are decoded in shared batches.

python examples/llama_index_workflow.py
"""

import asyncio
import time

from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from llama_index.llms.safe_llm import EnsembleEventHandler, SafeLLM

COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "Norway")


class Question(Event):  # noqa: D101
    text: str


class Answer(Event):  # noqa: D101
    text: str


class FanOut(Workflow):
    """Ask all at once, collect the answers."""

    def __init__(self, llm: SafeLLM) -> None:
        super().__init__(timeout=600)
        self.llm = llm

    @step
    async def start(self, ctx: Context, ev: StartEvent) -> Question | None:  # noqa: ARG002, D102
        for country in COUNTRIES:
            ctx.send_event(Question(text=f"What is the capital of {country}? Answer in one word."))
        return None

    @step(num_workers=len(COUNTRIES))
    async def ask(self, ev: Question) -> Answer:  # noqa: D102
        return Answer(text=(await self.llm.acomplete(ev.text)).text)

    @step
    async def collect(self, ctx: Context, ev: Answer) -> StopEvent | None:  # noqa: D102
        return StopEvent(result=answers) if (answers := ctx.collect_events(ev, [Answer] * len(COUNTRIES))) else None


async def main(llm: SafeLLM | None = None) -> list[str]:
    """Run it, and show what sharing the batches saved."""
    llm = llm or SafeLLM(preset="demo", max_tokens=16)
    started = time.perf_counter()
    with EnsembleEventHandler().listening() as totals:
        answers = await FanOut(llm).run()
    print("\n".join(answer.text for answer in answers))
    passed = time.perf_counter() - started
    print(f"{totals.n_runs} answers took {totals.latency_s['total']:.1f} s of waiting in {passed:.1f} s")
    return [answer.text for answer in answers]


if __name__ == "__main__":
    asyncio.run(main())
