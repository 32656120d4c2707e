"""Environment script of Alembic for all services. It runs the migrations on the connection that
`headrace_runtime.storage.database` passes to it."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, version_table="schema_version", transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
