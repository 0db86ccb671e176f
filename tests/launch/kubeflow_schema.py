"""JSON schemas for Kubeflow's TrainJob and TrainingRuntime, limited to the keys that Paceline writes."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 1}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of, "minItems": 1}


TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
METADATA = _object({"name": TEXT}, {"namespace": TEXT, "labels": TEXTS})
ENVIRONMENT = _list(_object({"name": TEXT}, {"value": {"type": "string"}}))
TRAIN_JOB = _object(
    {
        "apiVersion": {"const": "trainer.kubeflow.org/v1alpha1"},
        "kind": {"const": "TrainJob"},
        "metadata": METADATA,
        "spec": _object(
            {
                "runtimeRef": _object(
                    {
                        "apiGroup": {"const": "trainer.kubeflow.org"},
                        "kind": {"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]},
                        "name": TEXT,
                    }
                ),
                "trainer": _object(
                    {"numNodes": COUNT, "image": TEXT, "command": _list(TEXT)},
                    {"env": ENVIRONMENT, "args": _list(TEXT), "resourcesPerNode": _object({}, {"limits": TEXTS})},
                ),
            }
        ),
    }
)
TRAINING_RUNTIME = _object(
    {
        "apiVersion": {"const": "trainer.kubeflow.org/v1alpha1"},
        "kind": {"const": "TrainingRuntime"},
        "metadata": METADATA,
        "spec": _object(
            {
                "mlPolicy": _object({"numNodes": COUNT, "torch": {"type": "object"}}),
                "template": _object(
                    {
                        "spec": _object(
                            {
                                "replicatedJobs": _list(
                                    _object(
                                        {
                                            "name": {"const": "node"},
                                            # A separate validator checks the Job template.
                                            "template": _object(
                                                {"metadata": _object({"labels": TEXTS}), "spec": {"type": "object"}}
                                            ),
                                        }
                                    )
                                )
                            }
                        )
                    }
                ),
            }
        ),
    }
)
