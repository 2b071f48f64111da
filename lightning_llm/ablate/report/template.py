"""The one HTML template of reports: a page, or a fragment for a notebook. Jinja escapes all that is filled in."""

TEMPLATE = r"""
{% macro table_of(table) %}
<div class="wide"><table{% if table.is_text %} class="text"{% endif %}>
<thead><tr>{% for title in table.head %}<th>{{ title.replace("\n", " ") | printable }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>{% for cell in row %}<td>{{ cell | printable }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}
{% macro parts_of(parts) %}
{% for part in parts %}
{% set kind = kind_of(part) %}
{% if kind == "paragraph" %}
{% if part %}<p>{{ part | printable }}</p>{% endif %}

{% elif kind == "caption" %}
<p class="soft">{{ part.text | printable }}</p>
{% elif kind == "figure" %}
<figure>{{ svg(part) }}{% if part.caption %}<figcaption>{{ part.caption | printable }}</figcaption>{% endif %}</figure>
{% elif kind == "diff" %}
<p>{{ part.name | printable }}: <a href="{{ part.path }}">the whole diff</a></p>
<pre>{{ part.summary | printable }}</pre>
{% elif part.fold %}
<details><summary>{{ part.fold | printable }}</summary>{{ table_of(part) }}</details>
{% else %}
{{ table_of(part) }}
{% endif %}
{% endfor %}
{% endmacro %}
{% macro style(scope) %}
<style>
{{ scope }} .soft, {{ scope }} figcaption { color: var(--soft, #57606a); font-size: 0.9rem; }
{{ scope }} p { margin: 0.4rem 0; }
{{ scope }} .wide { overflow-x: auto; }
{{ scope }} table { border-collapse: collapse; font-size: 0.9rem; }
{{ scope }} th, {{ scope }} td { text-align: right; padding: 0.25rem 0.7rem;
  border-bottom: 1px solid var(--line, #d0d7de); }
{{ scope }} th { vertical-align: bottom; font-weight: 600; }
{{ scope }} th:first-child, {{ scope }} td:first-child { text-align: left; }
{{ scope }} table.text td, {{ scope }} table.text th { text-align: left; }
{{ scope }} pre { font-size: 0.85rem; overflow-x: auto; }
{{ scope }} figure { margin: 0.5rem 0; }
{{ scope }} svg { max-width: 100%; height: auto; }
</style>
{% endmacro %}
{% if whole %}
<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width"><title>{{ document.title | printable }}: report</title>
<style>
:root { color-scheme: light dark; --ink: #24292f; --page: #ffffff; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0d1117; --line: #30363d; --soft: #9198a1; } }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
</style>
{{ style("body") }}
</head>
<body>
<h1>{{ document.title | printable }}</h1>
{{ parts_of(document.about) }}
{% for section in [document.found] + document.sections | list %}
<h2>{{ section.title | printable }}</h2>
{{ parts_of(section.parts) }}
{% endfor %}
{% for line in document.footer %}
<p class="soft">{{ line | printable }}</p>
{% endfor %}
</body></html>
{% else %}
<div class="lightning-llm-report">
{{ style(".lightning-llm-report") }}
<p><strong>{{ document.title | printable }}</strong></p>
{{ parts_of(document.found.parts) }}
{% for section in document.sections %}
<details><summary>{{ section.title | printable }}</summary>
{{ parts_of(section.parts) }}
</details>
{% endfor %}
</div>
{% endif %}
"""
