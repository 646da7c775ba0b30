"""Write docs/recipe_settings.md from the schema of recipes: `python docs/make_recipe_settings.py`."""

import inspect
import json
from pathlib import Path

from msgspec import inspect as schema

from patchguard.training.recipe import GROUPS, Recipe, describe_kind

PAGE = Path(__file__).parent / "recipe_settings.md"


def page() -> str:
    """Return the page: one table per group."""
    defaults = Recipe(name="").to_json()
    about = (
        "For `patchguard train --set GROUP.KEY=VALUE`. Made from the code; the [glossary](glossary.md) has the words."
    )
    lines = ["# Settings of a recipe", "", about]
    fields = {each.name: each.type for each in schema.type_info(Recipe).fields}
    alone = {name: kind for name, kind in fields.items() if name not in GROUPS}
    groups = {"": alone} | {name: {each.name: each.type for each in fields[name].fields} for name in GROUPS}
    for group, settings in groups.items():
        lines += ["", f"## {group or 'The recipe'}", "", inspect.getdoc(GROUPS.get(group, Recipe)) or "", ""]
        lines += ["| setting | value | default |", "|---|---|---|"]
        values = defaults[group] if group else defaults
        for name, kind in settings.items():
            key, default = f"{group}.{name}".lstrip("."), values[name]
            lines.append(f"| `{key}` | {describe_kind(kind, default)} | `{json.dumps(default)}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
