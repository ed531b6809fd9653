"""What a controller does once, when it starts to serve."""

import importlib

from pacekeeper.predictor.stats.cusum_design import chart_rules, gaussian


def import_early() -> None:
    """What the first fit and the first thresholds import when they need it: now, beside the loop.

    With the law of healthy residuals, which is made once, nearly a second.
    """
    importlib.import_module("scipy.optimize")
    chart_rules(gaussian(), samples=1e6)
