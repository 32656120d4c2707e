package io.agentscope.core.training.runner;

import headrace.training.ReadOnlyTools;
import io.agentscope.core.ReActAgent;
import io.agentscope.core.agent.Agent;
import io.agentscope.core.memory.InMemoryMemory;
import io.agentscope.core.model.ExecutionConfig;
import io.agentscope.core.model.Model;
import io.agentscope.core.tool.ToolExecutionContext;

/**
 * Stands before the class of this name in agentscope-extensions-training 1.0.9, which fails for every agent: it looks for
 * {@code toolkit} among the fields of ReActAgent, and 1.0.9 has it in the class above. This one asks the agent's public
 * methods, and reads no more than three private fields. It also gives the copy only the tools that are marked read-only.
 */
public class AgentCloner {
    /** The runner passes over agents of such a name, so that no copy is copied. */
    private static final String SUFFIX = "-shadow";

    /** A fresh agent that answers with {@code model}. Memory, hooks and generation options are not the original's. */
    public static Agent cloneWithModel(Agent original, Model model) {
        if (!(original instanceof ReActAgent agent)) {
            throw new UnsupportedOperationException("only a ReActAgent can be copied, not a " + original.getClass().getName());
        }
        ReActAgent.Builder builder =
                ReActAgent.builder()
                        .name(agent.getName() + SUFFIX)
                        .description(agent.getDescription())
                        .sysPrompt(agent.getSysPrompt())
                        .model(model)
                        .toolkit(ReadOnlyTools.guarded(agent.getToolkit()))
                        .memory(new InMemoryMemory())
                        .maxIters(agent.getMaxIters());
        ExecutionConfig calls = field(agent, "modelExecutionConfig", ExecutionConfig.class);
        if (calls != null) {
            builder.modelExecutionConfig(calls);
        }
        ExecutionConfig tools = field(agent, "toolExecutionConfig", ExecutionConfig.class);
        if (tools != null) {
            builder.toolExecutionConfig(tools);
        }
        ToolExecutionContext context = field(agent, "toolExecutionContext", ToolExecutionContext.class);
        if (context != null) {
            builder.toolExecutionContext(context);
        }
        return builder.build();
    }

    private static <T> T field(ReActAgent agent, String name, Class<T> type) {
        try {
            var field = ReActAgent.class.getDeclaredField(name);
            field.setAccessible(true);
            return type.cast(field.get(agent));
        } catch (ReflectiveOperationException error) {
            throw new IllegalStateException("ReActAgent of another version: it has no field " + name, error);
        }
    }
}
