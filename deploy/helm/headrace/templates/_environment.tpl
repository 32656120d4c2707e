{{- /* The environment of a service: dict "root", "service", "values" (its section of the values). Text that could be taken
for a number is a TOML string. */ -}}
{{- define "headrace.environment" -}}
{{- $values := .root.Values -}}
{{- $single := $values.single.enabled -}}
- { name: HEADRACE_CONFIG, value: /etc/headrace/headrace.toml }
- { name: HEADRACE_BUS__ADDRESS, value: {{ $single | ternary "127.0.0.1:9092" $values.bus.address | quote }} }
- { name: HEADRACE_BUS__REPLICATION, value: {{ $single | ternary 1 $values.bus.replication | toString | quote }} }
- { name: HEADRACE_LOGS__LEVEL, value: {{ $values.logLevel | quote }} }
- { name: HANG_TIMEOUT_S, value: {{ $values.hangTimeoutS | toString | quote }} }
{{ include "headrace.fromSecret" (dict "name" "HEADRACE_SECURITY__INTERNAL_KEY" "secret" $values.internalKeySecret) }}
{{- if and (not $single) $values.blobs.url }}
- { name: HEADRACE_BLOBS__URL, value: {{ $values.blobs.url | quote }} }
{{- end }}
{{- if and (not $single) (has .service (list "collector" "scorer" "judge" "registry" "console")) }}
{{ include "headrace.fromSecret" (dict "name" "HEADRACE_DATABASE__URL" "secret" $values.database.urlSecret) }}
{{- end }}
- { name: HEADRACE_{{ upper .service }}__HOST, value: "0.0.0.0" }
{{- include (printf "headrace.environment.%s" .service) . }}
{{- range $name, $value := .values.environment }}
- { name: {{ $name }}, value: {{ $value | quote }} }
{{- end }}
{{- end }}

{{- define "headrace.fromSecret" -}}
- name: {{ .name }}
  valueFrom: { secretKeyRef: { name: {{ .secret.name }}, key: {{ .secret.key }} } }
{{- end }}

{{- define "headrace.environment.gateway" }}
- { name: HEADRACE_GATEWAY__KEYS_FILE, value: /etc/headrace/keys/keys.toml }
{{- end }}

{{- define "headrace.environment.registry" }}
- { name: HEADRACE_REGISTRY__GATE__BASE_URL, value: "http://{{ include "headrace.gatewayHost" .root }}/v1" }
{{ include "headrace.fromSecret" (dict "name" "OPENAI_API_KEY" "secret" .root.Values.internalKeySecret) }} # of the gate, one of us
- { name: HEADRACE_REGISTRY__GATE__ENVIRONMENT, value: {{ list "OPENAI_API_KEY" | toJson | quote }} }
{{- end }}

{{- define "headrace.gatewayHost" -}}
{{- if .Values.single.enabled -}}127.0.0.1:8000
{{- else -}}{{ include "headrace.fullname" . }}-gateway:{{ .Values.gateway.service.port }}
{{- end -}}
{{- end }}

{{- define "headrace.environment.inference" }}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- { name: HEADRACE_INFERENCE__REPLICA_ID, value: $(POD_NAME) }
- { name: HEADRACE_INFERENCE__ADVERTISE_URL, value: "http://{{ .root.Values.single.enabled | ternary "127.0.0.1" "$(POD_IP)" }}:8010" }
{{- if include "headrace.onVllm" . }}
- { name: HEADRACE_INFERENCE__ENGINE, value: vllm }
- { name: HEADRACE_INFERENCE__VLLM__TENSOR_PARALLEL, value: {{ .values.gpus | toString | quote }} }
{{- else if .values.gpus }}
- { name: HEADRACE_INFERENCE__TORCH__DEVICE, value: cuda }
{{- else }}
- { name: HEADRACE_INFERENCE__TORCH__DEVICE, value: cpu }
- { name: HEADRACE_INFERENCE__TORCH__THREADS, value: {{ .values.threads | toString | quote }} }
{{- end }}
{{- end }}

{{- define "headrace.environment.trainer" }}
- { name: HEADRACE_TRAINER__MODEL, value: {{ .values.model | toJson | quote }} }
- { name: HEADRACE_TRAINER__LINEAGE, value: {{ .values.lineage | toJson | quote }} }
- { name: HEADRACE_TRAINER__BASE, value: {{ .values.base | toJson | quote }} }
{{- if include "headrace.onTrinity" . }}
- { name: HEADRACE_TRAINER__BACKEND, value: trinity }
- { name: HEADRACE_TRAINER__TRINITY__FOLDER, value: /var/lib/headrace/trainer/trinity }
- { name: HEADRACE_TRAINER__TRINITY__COMMAND, value: {{ list "/opt/trinity-run" | toJson | quote }} }
- { name: HEADRACE_TRAINER__TRINITY__GPUS_PER_NODE, value: {{ .values.gpus | toString | quote }} }
{{- else if .values.gpus }}
- { name: HEADRACE_TRAINER__COMPUTE__DEVICE, value: cuda }
- { name: HEADRACE_TRAINER__COMPUTE__DTYPE, value: bfloat16 }
{{- else }}
- { name: HEADRACE_TRAINER__COMPUTE__DEVICE, value: cpu }
- { name: HEADRACE_TRAINER__COMPUTE__THREADS, value: {{ .values.threads | toString | quote }} }
{{- end }}
{{- end }}

{{- define "headrace.environment.judge" }}
- { name: HEADRACE_JUDGE__ENDPOINT__BASE_URL, value: {{ .values.endpoint.baseUrl | quote }} }
- { name: HEADRACE_JUDGE__ENDPOINT__MODEL, value: {{ .values.endpoint.model | toJson | quote }} }
{{- if .values.endpoint.apiKeySecret.name }}
{{ include "headrace.fromSecret" (dict "name" "HEADRACE_JUDGE__ENDPOINT__API_KEY" "secret" .values.endpoint.apiKeySecret) }}
{{- end }}
{{- end }}

{{- define "headrace.environment.collector" }}{{ end }}
{{- define "headrace.environment.scorer" }}{{ end }}
{{- define "headrace.environment.broker" }}{{ end }}

{{- define "headrace.environment.console" }}
- { name: HEADRACE_CONSOLE__BEHIND_TLS, value: "true" }
{{- if not .root.Values.single.enabled }}
{{- $urls := list }}
{{- range $service := splitList " " (include "headrace.services" .root) }}
{{- $port := eq $service "gateway" | ternary ($.root.Values.gateway.service.port | toString) (include "headrace.port" (dict "service" $service)) }}
{{- $urls = append $urls (printf "%s = \"http://%s-%s:%s\"" $service (include "headrace.fullname" $.root) $service $port) }}
{{- end }}
- { name: HEADRACE_CONSOLE__URLS, value: {{ printf "{%s}" (join ", " $urls) | quote }} }
{{- end }}
{{- end }}
