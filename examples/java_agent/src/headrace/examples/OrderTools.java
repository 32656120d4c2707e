package headrace.examples;

import io.agentscope.core.tool.Tool;
import io.agentscope.core.tool.ToolParam;

/** The tools of the agent. One of them writes. */
public class OrderTools {
    @Tool(name = "order_status", description = "Where an order is")
    public String status(@ToolParam(name = "order", description = "its number") String order) {
        return "Order " + order + " left the warehouse.";
    }

    @Tool(name = "cancel_order", description = "Cancel an order")
    public String cancel(@ToolParam(name = "order", description = "its number") String order) {
        return "Order " + order + " is cancelled.";
    }
}
