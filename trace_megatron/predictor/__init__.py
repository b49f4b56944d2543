"""V(history): the chance that the policy ends in success. Scores steer the allocators, never the policy's loss."""

from trace_megatron.predictor.build import build_predictor
from trace_megatron.predictor.controls import ConstantPredictor, OraclePredictor
from trace_megatron.predictor.diagnostics import PredictorDiagnostics, predictor_diagnostics
from trace_megatron.predictor.neural import NeuralPredictor
from trace_megatron.predictor.protocol import Predictor, PredictorStats, TimedScores

__all__ = [
    "ConstantPredictor",
    "NeuralPredictor",
    "OraclePredictor",
    "Predictor",
    "PredictorDiagnostics",
    "PredictorStats",
    "TimedScores",
    "build_predictor",
    "predictor_diagnostics",
]
