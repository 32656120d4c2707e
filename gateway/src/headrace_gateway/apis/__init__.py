"""The endpoints, by API: chat and text completions, Responses, Messages, sessions, models."""
