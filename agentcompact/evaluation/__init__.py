"""Measuring strategies: documents with questions, metrics, a runner that can be stopped, and reports.

>>> from agentcompact.evaluation import EvaluationPlan, choose_strategies, evaluate, read_documents
>>> plan = EvaluationPlan(choose_strategies(["attention_matching", "two_pass:shortlist=3"]), ratios=[4, 8])
>>> cells = evaluate(engine, read_documents(Path("my.jsonl")), plan, Path("results"))
"""

from agentcompact.evaluation.choices import StrategyChoice, choose_strategies
from agentcompact.evaluation.document_run import METRICS
from agentcompact.evaluation.records import Document, Question, read_documents
from agentcompact.evaluation.results import FULL, NO_CONTEXT, CellResult, QuestionResult
from agentcompact.evaluation.runner import EvaluationPlan, Step, evaluate
from agentcompact.evaluation.store import read_results
from agentcompact.evaluation.summary import SummaryRow, summarise
from agentcompact.evaluation.tasks import Task, generate_documents, make_task, resolve_tasks, task_names

__all__ = [
    "FULL",
    "METRICS",
    "NO_CONTEXT",
    "CellResult",
    "Document",
    "EvaluationPlan",
    "Question",
    "QuestionResult",
    "Step",
    "StrategyChoice",
    "SummaryRow",
    "Task",
    "choose_strategies",
    "evaluate",
    "generate_documents",
    "make_task",
    "read_documents",
    "read_results",
    "resolve_tasks",
    "summarise",
    "task_names",
]
