"""The share of words that the reference has too, under the name and key of the hub's metric of translations."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate


class WordOverlap(evaluate.Metric):  # type: ignore[misc]
    def _info(self) -> Any:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": datasets.Sequence(text)})
        return evaluate.MetricInfo(description=str(__doc__), citation="", features=features)

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        words = [
            (word, set(" ".join(texts).split()))
            for predicted, texts in zip(predictions, references, strict=True)
            for word in predicted.split()
        ]
        return {"score": 100.0 * sum(word in known for word, known in words) / max(1, len(words))}
