"""Token dispatch: which dispatcher can be used, what rows are padded to, and what dispatch has to compute."""

from moeref.dispatcher.from_config import contradictions, setup_of
from moeref.dispatcher.select import AUTO, Selection, automatic, installed, read, select, settings
from moeref.dispatcher.setup import Choice, DispatcherError, Environment, Setup
from moeref.dispatcher.table import RULES, Refusal, Rule, check, refusals, requirements

__all__ = [
    "AUTO",
    "RULES",
    "Choice",
    "DispatcherError",
    "Environment",
    "Refusal",
    "Rule",
    "Selection",
    "Setup",
    "automatic",
    "check",
    "contradictions",
    "installed",
    "read",
    "refusals",
    "requirements",
    "select",
    "settings",
    "setup_of",
]
