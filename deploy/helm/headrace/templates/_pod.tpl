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
