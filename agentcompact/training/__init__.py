"""Training writers: corpora, the teacher's caches, the losses and the loop."""

from agentcompact.training.corpus_builder import CorpusOptions, build_corpus
from agentcompact.training.settings import TrainingSettings
from agentcompact.training.teacher import Teacher, TeacherStore
from agentcompact.training.trainer import Trainer, TrainingStep, TrainingStopped
from agentcompact.training.windows import Corpus, Cue, Window, cut_corpus, read_texts

__all__ = [
    "Corpus",
    "CorpusOptions",
    "Cue",
    "Teacher",
    "TeacherStore",
    "Trainer",
    "TrainingSettings",
    "TrainingStep",
    "TrainingStopped",
    "Window",
    "build_corpus",
    "cut_corpus",
    "read_texts",
]
