"""Alembic's entry for all services: it runs on the connection that `headrace_runtime.storage.database` hands over."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table="schema_version", transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
