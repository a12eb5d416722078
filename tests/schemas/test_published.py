"""The published JSON Schema is what the code makes, and every alert keeps to it."""

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from schemas.alerts import (
    Alert,
    AlertState,
    Component,
    ComponentName,
    ComponentType,
    Evidence,
    Kind,
    Resolution,
    Severity,
    fingerprint,
)
from schemas.codec import decode_alert, encode_alert
from schemas.published import alert_json_schema


def names() -> dict[ComponentType, ComponentName]:
    return {
        ComponentType.GPU: ComponentName(type=ComponentType.GPU, node="node-3", gpu="GPU-5", rank=29),
        ComponentType.HOST: ComponentName(type=ComponentType.HOST, node="node-3"),
        ComponentType.RANK: ComponentName(type=ComponentType.RANK, rank=29),
        ComponentType.LINK: ComponentName(type=ComponentType.LINK, node="node-1", peer="node-2", comm_id="f00d"),
        ComponentType.STAGE: ComponentName(type=ComponentType.STAGE, stage=0),
        ComponentType.JOB: ComponentName(type=ComponentType.JOB),
    }


def alert(kind: Kind, component_type: ComponentType, resolution: Resolution | None) -> Alert:
    name = names()[component_type]
    component = Component(type=component_type, name=name, candidates=(name,))
    return Alert(
        schema_version=1,
        fingerprint=fingerprint("job", kind, component),
        revision=3,
        state=AlertState.FIRING if resolution is None else AlertState.RESOLVED,
        severity=Severity.WARNING,
        job_id="job",
        incarnation="0",
        kind=kind,
        component=component,
        onset_iteration=101,
        detected_iteration=103,
        as_of_iteration=107,
        resolved_iteration=None if resolution is None else 107,
        resolution=resolution,
        onset_time_ns=10**18,
        as_of_time_ns=10**18 + 7,
        slowdown_ratio=1.31,
        lost_gpu_s=17.0,
        confidence=0.97,
        sources=("gpu", "nvml"),
        evidence=(Evidence(what="computation over peers", value=1.31, unit="ratio", reference=1.0, source="gpu"),),
        causes=("thermal throttling",),
        advice="replace the node",
    )


@cache
def validator() -> Any:
    schema = msgspec.json.decode(alert_json_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_published_schema_is_the_one_that_the_code_makes(repository: Path) -> None:
    published = (repository / "schemas" / "alert.schema.json").read_text()
    assert published == alert_json_schema(), "run `failslow schema alert > schemas/alert.schema.json`"


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("component_type", ComponentType)
@pytest.mark.parametrize("resolution", [None, *Resolution])
def test_an_alert_keeps_to_the_schema_and_comes_back_from_it(
    kind: Kind, component_type: ComponentType, resolution: Resolution | None
) -> None:
    made = alert(kind, component_type, resolution)
    content = encode_alert(made)
    validator().validate(msgspec.json.decode(content))
    assert decode_alert(content) == made


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("severity", "disaster"),
        ("kind", "slow_coffee"),
        ("revision", "three"),
        ("onset_iteration", None),
        ("evidence", [{"what": "a number without a unit", "value": 1.0}]),
    ],
)
def test_what_is_no_alert_breaks_the_schema(field: str, value: object) -> None:
    content = {**msgspec.json.decode(encode_alert(alert(Kind.HANG, ComponentType.RANK, None))), field: value}
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(content)


@pytest.mark.parametrize("field", Alert.__struct_fields__)
def test_every_field_is_required(field: str) -> None:
    content = msgspec.json.decode(encode_alert(alert(Kind.SLOW_GPU, ComponentType.GPU, None)))
    del content[field]
    with pytest.raises(jsonschema.ValidationError, match="is a required property"):
        validator().validate(content)


def test_fields_that_a_later_version_adds_keep_to_the_schema() -> None:
    content = msgspec.json.decode(encode_alert(alert(Kind.SLOW_GPU, ComponentType.GPU, None)))
    validator().validate({**content, "mood": "cheerful"})
    assert decode_alert(msgspec.json.encode({**content, "mood": "cheerful"})).kind is Kind.SLOW_GPU
