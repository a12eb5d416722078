"""The JSON Schema of alerts, as consumers get it; schemas/alert.schema.json holds what this makes."""

import msgspec

from schemas.alerts import ALERT_SCHEMA_VERSION, Alert

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def alert_json_schema() -> str:
    """Return the JSON Schema of one alert. Objects may gain fields in later versions; readers must tolerate them."""
    schema = {
        "$schema": DIALECT,
        "title": f"failslow alert, schema version {ALERT_SCHEMA_VERSION}",
        **msgspec.json.schema(Alert),
    }
    return msgspec.json.format(msgspec.json.encode(schema), indent=2).decode() + "\n"
