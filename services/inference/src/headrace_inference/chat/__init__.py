"""Between messages and tokens: templates and exact prompts on the way in, parsers on the way out. Knows no engine."""
