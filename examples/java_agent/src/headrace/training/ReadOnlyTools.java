package headrace.training;

import io.agentscope.core.message.ToolResultBlock;
import io.agentscope.core.tool.AgentTool;
import io.agentscope.core.tool.ToolCallParam;
import io.agentscope.core.tool.Toolkit;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import reactor.core.publisher.Mono;

/**
 * Which tools a training copy may really call: those that were marked here, by name. A copy plays a request again that
 * was served already, so that any other tool is refused, by its name. Whoever marks a tool says that calling it again
 * changes nothing for anybody.
 */
public final class ReadOnlyTools {
    private static final Set<String> MARKED = ConcurrentHashMap.newKeySet();

    private ReadOnlyTools() {}

    public static void mark(String... names) {
        MARKED.addAll(List.of(names));
    }

    /** A copy of the toolkit whose other tools refuse; the agent that serves users keeps its own. */
    public static Toolkit guarded(Toolkit toolkit) {
        Toolkit guarded = toolkit.copy();
        for (String name : Set.copyOf(guarded.getToolNames())) {
            if (!MARKED.contains(name)) {
                AgentTool writes = guarded.getTool(name);
                guarded.removeTool(name);
                guarded.registerAgentTool(new Refusing(writes));
            }
        }
        return guarded;
    }

    private record Refusing(AgentTool tool) implements AgentTool {
        @Override
        public String getName() {
            return tool.getName();
        }

        @Override
        public String getDescription() {
            return tool.getDescription();
        }

        @Override
        public Map<String, Object> getParameters() {
            return tool.getParameters();
        }

        @Override
        public Mono<ToolResultBlock> callAsync(ToolCallParam call) {
            return Mono.just(ToolResultBlock.error(getName() + " is not marked read-only, so a training copy may not call it"));
        }
    }
}
