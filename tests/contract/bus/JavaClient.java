import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;

/** Kafka's own client: topics, an idempotent producer, a transaction, a consumer group, lag. Arguments: address, name. */
public class JavaClient {
    static final int RECORDS = 500;

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0];
        String name = arguments[1];
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.createTopics(List.of(new NewTopic(name, 2, (short) 1))).all().get();
            produce(address, name);
            transact(address, name);
            List<String> values = consume(address, name);
            check(values.size() == RECORDS + 1, values.size() + " records");
            check(values.contains("committed") && !values.contains("aborted"), "the transaction");
            check(lag(admin, name) == 0, "lag");
            administer(admin, name);
            check(admin.describeConsumerGroups(List.of(name)).all().get().containsKey(name), "the group");
            admin.deleteConsumerGroups(List.of(name)).all().get();
            admin.deleteTopics(List.of(name)).all().get();
        }
        System.out.println("ok");
    }

    /** Settings, partitions, sizes, transactions, and the start of a log, as administrators look at and change them. */
    static void administer(Admin admin, String name) throws Exception {
        ConfigResource topic = new ConfigResource(ConfigResource.Type.TOPIC, name);
        admin.incrementalAlterConfigs(Map.of(topic, List.of(
            new AlterConfigOp(new ConfigEntry("retention.ms", "3600000"), AlterConfigOp.OpType.SET),
            new AlterConfigOp(new ConfigEntry("segment.bytes", "2000000"), AlterConfigOp.OpType.SET)))).all().get();
        var config = admin.describeConfigs(List.of(topic)).all().get().get(topic);
        check(config.get("retention.ms").value().equals("3600000"), "retention.ms");
        check(config.get("segment.bytes").value().equals("2000000"), "segment.bytes");
        admin.createPartitions(Map.of(name, NewPartitions.increaseTo(3))).all().get();
        check(admin.describeTopics(List.of(name)).allTopicNames().get().get(name).partitions().size() == 3, "growth");
        TopicPartition partition = new TopicPartition(name, 0);
        long bytes = admin.describeLogDirs(List.of(1)).allDescriptions().get().get(1).values().stream()
            .mapToLong(dir -> dir.replicaInfos().containsKey(partition) ? dir.replicaInfos().get(partition).size() : 0).sum();
        check(bytes > 1000, bytes + " bytes");
        check(admin.listTransactions().all().get().stream().anyMatch(t -> t.transactionalId().equals(name)), "transactions");
        var described = admin.describeTransactions(List.of(name)).all().get().get(name);
        check(described.transactionTimeoutMs() == 60_000, "the transaction: " + described);
        var producers = admin.describeProducers(List.of(partition)).partitionResult(partition).get().activeProducers();
        check(!producers.isEmpty(), "producers");
        long low = admin.deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(3)))
            .lowWatermarks().get(partition).get().lowWatermark();
        check(low == 3, "low watermark " + low);
        long first = admin.listOffsets(Map.of(partition, OffsetSpec.earliest())).all().get().get(partition).offset();
        check(first == 3, "first offset " + first);
    }

    static Properties settings(String address) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", address);
        for (String side : List.of("key", "value")) {
            settings.put(side + ".serializer", "org.apache.kafka.common.serialization.StringSerializer");
            settings.put(side + ".deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        }
        return settings;
    }

    static void produce(String address, String topic) throws Exception {
        Properties settings = settings(address);
        settings.put("compression.type", "zstd");
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            for (int number = 0; number < RECORDS; number++) {
                producer.send(new ProducerRecord<>(topic, "key-" + number % 7, "value-" + number));
            }
        }
    }

    static void transact(String address, String topic) throws Exception {
        Properties settings = settings(address);
        settings.put("transactional.id", topic);
        try (KafkaProducer<String, String> producer = new KafkaProducer<>(settings)) {
            producer.initTransactions();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, "key", "aborted"));
            producer.flush();
            producer.abortTransaction();
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, "key", "committed"));
            producer.commitTransaction();
        }
    }

    static List<String> consume(String address, String topic) {
        Properties settings = settings(address);
        settings.put("group.id", topic);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("isolation.level", "read_committed");
        List<String> values = new ArrayList<>();
        try (KafkaConsumer<String, String> consumer = new KafkaConsumer<>(settings)) {
            consumer.subscribe(List.of(topic));
            long deadline = System.nanoTime() + Duration.ofSeconds(20).toNanos();
            while (!values.contains("committed") || values.size() <= RECORDS) {
                check(System.nanoTime() < deadline, "only " + values.size() + " records came");
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(200))) {
                    values.add(record.value());
                }
            }
            consumer.commitSync();
        }
        return values;
    }

    static long lag(Admin admin, String topic) throws ExecutionException, InterruptedException {
        long behind = 0;
        var committed = admin.listConsumerGroupOffsets(topic).partitionsToOffsetAndMetadata().get();
        for (int number = 0; number < 2; number++) {
            TopicPartition partition = new TopicPartition(topic, number);
            long end = admin.listOffsets(Map.of(partition, OffsetSpec.latest())).all().get().get(partition).offset();
            behind += end - committed.get(partition).offset();
        }
        return behind;
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new IllegalStateException(what);
        }
    }
}
