{{- /* Labels of a Pod: dict "root", "name" (its component), "set" where several sets have the same component. */ -}}
{{- define "headrace.podMetadata" -}}
labels:
  {{- include "headrace.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .name }}
  {{- with .set }}
  headrace/set: {{ . }}
  {{- end }}
annotations:
  checksum/settings: {{ .root.Values.settings | sha256sum }}
  {{- with .root.Values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{- /* A Pod: dict "root", "services" (of service to its values), "placement" (the values that say where it runs). */ -}}
{{- define "headrace.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false # variables such as HEADRACE_GATEWAY_PORT would be taken for settings
shareProcessNamespace: true # somebody reaps what a gate or a reward function leaves behind
terminationGracePeriodSeconds: {{ hasKey .services "gateway" | ternary (add 30 (int .root.Values.gateway.drainS)) 30 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $.placement $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .services.broker }}
initContainers:
  {{- include "headrace.container" (dict "root" $.root "service" "broker" "values" .) | nindent 2 }}
{{- end }}
containers:
  {{- range $service, $values := omit .services "broker" }}
  {{- include "headrace.container" (dict "root" $.root "service" $service "values" $values) | nindent 2 }}
  {{- end }}
volumes:
  {{- include "headrace.volumes" . | nindent 2 }}
{{- end }}

{{- define "headrace.volumes" -}}
{{- $values := .root.Values -}}
{{- $shared := false -}}
- { name: settings, configMap: { name: {{ include "headrace.fullname" .root }}-settings } }
- { name: tmp, emptyDir: {} }
{{- if not $values.single.enabled }}
- { name: data, emptyDir: {} }
{{- if not $values.blobs.url }}
- name: blobs
  persistentVolumeClaim: { claimName: {{ $values.blobs.claim.existing | default (printf "%s-blobs" (include "headrace.fullname" .root)) }} }
{{- end }}
{{- else if $values.single.storage.existingClaim }}
- { name: data, persistentVolumeClaim: { claimName: {{ $values.single.storage.existingClaim }} } }
{{- end }}
{{- range $service, $values := .services }}
{{- if or (include "headrace.onVllm" (dict "service" $service "values" $values)) (include "headrace.onTrinity" (dict "service" $service "values" $values)) }}
{{- $shared = true }}
{{- end }}
{{- end }}
{{- if $shared }}
- { name: shared-memory, emptyDir: { medium: Memory } } # what processes that share GPUs hand each other
{{- end }}
{{- if hasKey .services "gateway" }}
- name: keys
  secret:
    secretName: {{ $values.gateway.keysSecret.name }}
    items: [{ key: {{ $values.gateway.keysSecret.key }}, path: keys.toml }]
{{- end }}
{{- if and (hasKey .services "trainer") $values.models.claim }}
- { name: models, persistentVolumeClaim: { claimName: {{ $values.models.claim }}, readOnly: true } }
{{- end }}
{{- if or (hasKey .services "scorer") (hasKey .services "registry") (hasKey .services "judge") }}
{{- with $values.code.configMap }}
- { name: code, configMap: { name: {{ . }} } }
{{- end }}
{{- with $values.code.claim }}
- { name: code, persistentVolumeClaim: { claimName: {{ . }}, readOnly: true } }
{{- end }}
{{- end }}
{{- end }}

{{- /* A claim template: dict "name", "storage" (size, className), "access". */ -}}
{{- define "headrace.claimSpec" -}}
accessModes: {{ .access | toJson }}
{{- with .storage.className }}
storageClassName: {{ . }}
{{- end }}
resources: { requests: { storage: {{ .storage.size }} } }
{{- end }}

{{- /* The container of a service: dict "root", "service", "values". Nothing of it can be written but its volumes. There is no
liveness probe: an unready service is no reason to restart one, and what hangs is ended by the watchdog in the image. */ -}}
{{- define "headrace.container" -}}
- name: {{ .service }}
  image: {{ include "headrace.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  ports: [{ name: {{ .service }}, containerPort: {{ include "headrace.port" . }} }]
  env:
    {{- include "headrace.environment" . | nindent 4 }}
  {{- with include "headrace.environmentSecrets" . }}
  envFrom:
    {{- . | trim | nindent 4 }}
  {{- end }}
  readinessProbe:
    httpGet: { path: /health, port: {{ .service }} }
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  {{- if eq .service "broker" }}
  restartPolicy: Always # a sidecar: there before the others start, and after they have stopped
  startupProbe:
    httpGet: { path: /health, port: broker }
    periodSeconds: 1
    timeoutSeconds: 3
    failureThreshold: 300
  {{- end }}
  {{- if eq .service "gateway" }}
  lifecycle: { preStop: { exec: { command: [sleep, {{ .values.drainS | toString | quote }}] } } }
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: { drop: [ALL] }
  resources:
    {{- $resources := deepCopy .values.resources }}
    {{- with .values.gpus }}
    {{- $resources = mergeOverwrite $resources (dict "limits" (dict $.root.Values.gpuResource .)) }}
    {{- end }}
    {{- toYaml $resources | nindent 4 }}
  volumeMounts:
    {{- include "headrace.mounts" . | nindent 4 }}
{{- end }}

{{- define "headrace.environmentSecrets" -}}
{{- $names := .values.environmentSecrets | default list -}}
{{- if and .root.Values.blobs.credentialsSecret (not .root.Values.single.enabled) -}}
{{- $names = append $names .root.Values.blobs.credentialsSecret -}}
{{- end -}}
{{- range $names }}
- secretRef: { name: {{ . }} }
{{- end }}
{{- end }}

{{- /* What a service sees of the volumes of its Pod. All of `data_dir` can be written: a part that is no volume of its own
is scratch. */ -}}
{{- define "headrace.mounts" -}}
{{- $values := .root.Values -}}
- { name: settings, mountPath: /etc/headrace/headrace.toml, subPath: headrace.toml, readOnly: true }
- { name: tmp, mountPath: /tmp{{ if $values.single.enabled }}, subPath: {{ .service }}{{ end }} }
- { name: data, mountPath: /var/lib/headrace }
{{- if not $values.single.enabled }}
{{- if not $values.blobs.url }}
- { name: blobs, mountPath: /var/lib/headrace/blobs }
{{- end }}
{{- if has .service (list "gateway" "trainer") }}
- { name: own, mountPath: /var/lib/headrace/{{ .service }} }
{{- end }}
{{- end }}
{{- if or (include "headrace.onVllm" .) (include "headrace.onTrinity" .) }}
- { name: shared-memory, mountPath: /dev/shm }
{{- end }}
{{- if eq .service "gateway" }}
- { name: keys, mountPath: /etc/headrace/keys, readOnly: true }
{{- end }}
{{- if and (eq .service "trainer") $values.models.claim }}
- { name: models, mountPath: /models, readOnly: true }
{{- end }}
{{- if and (has .service (list "scorer" "registry" "judge")) (or $values.code.configMap $values.code.claim) }}
- { name: code, mountPath: /srv/code, readOnly: true }
{{- end }}
{{- end }}

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
