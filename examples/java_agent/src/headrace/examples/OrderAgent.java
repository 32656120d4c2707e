package headrace.examples;

import headrace.training.ReadOnlyTools;
import io.agentscope.core.ReActAgent;
import io.agentscope.core.agent.Agent;
import io.agentscope.core.message.Msg;
import io.agentscope.core.message.MsgRole;
import io.agentscope.core.message.ToolUseBlock;
import io.agentscope.core.model.OpenAIChatModel;
import io.agentscope.core.tool.ToolCallParam;
import io.agentscope.core.tool.Toolkit;
import io.agentscope.core.training.runner.AgentCloner;
import io.agentscope.core.training.runner.TrainingRunner;
import io.agentscope.core.training.strategy.ExplicitMarkingStrategy;
import io.agentscope.core.training.strategy.SamplingRateStrategy;
import io.agentscope.core.training.strategy.TrainingContext;
import io.agentscope.core.training.strategy.TrainingSelectionStrategy;
import java.util.List;
import java.util.Map;

/**
 * An agent about orders that learns from its users' requests. Users are answered by the production model; AgentScope's
 * training runner has copies play their requests again with the trained model, through the port of Headrace's gateway that
 * Trinity-RFT's clients expect.
 *
 * <pre>OrderAgent sampling|marking TRINITY_URL TRAINED_MODEL PRODUCTION_URL PRODUCTION_MODEL</pre>
 *
 * <p>It prints what users read, a line each, then serves on until its standard input ends, as a service would.
 */
public final class OrderAgent {
    private static final List<String> QUESTIONS =
            List.of("Where is order 7?", "Where is order 11?", "Is order 12 paid?", "When does order 15 come?");

    public static void main(String[] words) throws Exception {
        boolean sampling = words[0].equals("sampling");
        ReadOnlyTools.mark("order_status");
        TrainingRunner runner =
                TrainingRunner.builder()
                        .trinityEndpoint(words[1])
                        .modelName(words[2])
                        .selectionStrategy(sampling ? everyRequest() : ExplicitMarkingStrategy.create())
                        .rewardCalculator(OrderAgent::brevity)
                        .commitIntervalSeconds(1) // 300 in earnest; here somebody waits for it
                        .repeatTime(sampling ? 4 : 1)
                        .build();
        runner.start(); // agents that are built before this are not watched
        try {
            ReActAgent agent = agent(words[3], words[4]);
            System.out.println("refused\t" + cancelledByACopy(agent));
            for (int number = 0; number < QUESTIONS.size(); number++) {
                boolean marked = !sampling && number % 2 == 0;
                System.out.println("answer\t" + ask(agent, QUESTIONS.get(number), marked ? "marked-" + number : null));
            }
            System.out.flush();
            while (System.in.read() >= 0) {}
        } finally {
            runner.stop();
        }
        System.out.println("stopped\t");
        System.exit(0); // clients of the runner keep threads
    }

    private static TrainingSelectionStrategy everyRequest() {
        return SamplingRateStrategy.of(1.0);
    }

    private static ReActAgent agent(String url, String model) {
        Toolkit toolkit = new Toolkit();
        toolkit.registerTool(new OrderTools());
        return ReActAgent.builder()
                .name("orders")
                .sysPrompt("You answer questions about orders, in one short sentence.")
                .model(OpenAIChatModel.builder().baseUrl(url).apiKey("-").modelName(model).stream(false).build())
                .toolkit(toolkit)
                .maxIters(3)
                .build();
    }

    /** Marks go into Reactor's context: the bare statement {@code TrainingContext.mark(...)} marks nothing. */
    private static String ask(ReActAgent agent, String text, String task) {
        Msg question = Msg.builder().name("user").role(MsgRole.USER).textContent(text).build();
        var answer = agent.call(question);
        if (task != null) {
            answer = answer.contextWrite(TrainingContext.mark(List.of("user-feedback"), Map.of("taskId", task)));
        }
        return answer.block().getTextContent();
    }

    /** The reward of a run: short answers are worth more. What throws here sends no feedback, and the run is not trained. */
    private static double brevity(Agent copy) {
        List<Msg> messages = ((ReActAgent) copy).getMemory().getMessages();
        String last = messages.get(messages.size() - 1).getTextContent();
        return 1.0 / (1.0 + last.length() / 20.0);
    }

    /** What a copy of the agent is told when it tries to write. */
    private static Object cancelledByACopy(ReActAgent agent) {
        ReActAgent copy = (ReActAgent) AgentCloner.cloneWithModel(agent, agent.getModel());
        var use = new ToolUseBlock("call-1", "cancel_order", Map.of("order", "7"));
        var call = ToolCallParam.builder().toolUseBlock(use).input(Map.of("order", "7")).build();
        return copy.getToolkit().getTool("cancel_order").callAsync(call).block().getOutput().get(0);
    }
}
